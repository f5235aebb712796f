"""Tokens from a trained model, one by one as they come."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from traformer.devices import flush_denormals
from traformer.errors import InputError
from traformer.models import TraformerForCausalLM
from traformer.tasks import Task
from traformer.types import JsonObject


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: the likeliest, or drawn at a temperature among the top_k or top_p likeliest."""

    temperature: float = 0.0  # 0 = the likeliest
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise InputError(f"temperature must be >= 0 and finite, not {self.temperature}")
        if not 0 <= self.seed < 2**63:
            raise InputError(f"seed {self.seed} is out of range; give a whole number from 0 to 2**63 - 1")
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"top_k must be at least 1, not {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InputError(f"top_p must be in (0, 1], not {self.top_p}")
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            raise InputError("top_k and top_p choose among tokens that are drawn; give a temperature above 0 with them")

    def settings(self) -> JsonObject:
        """As transformers' generate takes them."""
        if self.temperature == 0:
            return {"do_sample": False}
        # generate has a top_k of its own unless told otherwise; 0 is none.
        return {
            "do_sample": True,
            "temperature": self.temperature,
            "top_k": self.top_k or 0,
            "top_p": 1.0 if self.top_p is None else self.top_p,
        }


@dataclass(frozen=True)
class Generation:
    """What was generated, and why it ended: "end" (the end token), "length" or "interrupted"."""

    prompt_ids: list[int]
    ids: list[int]
    text: str
    ended_by: str


class _Collector(BaseStreamer):
    """Receives each token from generate, keeps it, and passes on the text it adds as soon as that is certain."""

    def __init__(self, task: Task, prompt_ids: list[int], on_text: Callable[[str], None]) -> None:
        self.task, self.on_text = task, on_text
        self.prompt_length = len(prompt_ids)
        self.ids = list(prompt_ids)
        self.text = ""
        # A token's text can depend on the one before it, so tokens are read from a little before the first unread one.
        self.context_start, self.unread = max(len(prompt_ids) - 8, 0), len(prompt_ids)
        self.has_prompt = False

    def put(self, value: torch.Tensor) -> None:
        if not self.has_prompt:  # generate first passes the prompt
            self.has_prompt = True
            return
        self.ids.append(int(value))
        self._read(is_last=False)

    def end(self) -> None:
        self._read(is_last=True)

    def _read(self, is_last: bool) -> None:
        known = self.task.decode(self.ids[self.context_start : self.unread])
        text = self.task.decode(self.ids[self.context_start :])
        if len(text) > len(known) and (is_last or not text.endswith("\ufffd")):  # half of a character's bytes
            self.context_start, self.unread = self.unread, len(self.ids)
            self.text += text[len(known) :]
            self.on_text(text[len(known) :])

    @property
    def new_ids(self) -> list[int]:
        return self.ids[self.prompt_length :]


@flush_denormals()
def generate_text(
    model: TraformerForCausalLM,
    task: Task,
    prompt: str,
    *,
    max_new_tokens: int = 128,
    sampling: Sampling | None = None,
    on_text: Callable[[str], None] = lambda text: None,
) -> Generation:
    """Continue a prompt given as text in the task's tokens; on_text gets every piece of text as it comes.

    An interrupt (Ctrl-C) ends it and keeps what there is.
    """
    prompt_ids = task.encode(prompt)
    if not prompt_ids:
        raise InputError(f"the prompt is empty; give at least one token of {task.name}")
    sampling = sampling or Sampling()
    inputs = torch.tensor([prompt_ids], device=model.device)
    end = task.end_id
    collector = _Collector(task, prompt_ids, on_text)
    if sampling.temperature > 0:
        torch.manual_seed(sampling.seed)
    try:
        model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),  # all of a prompt is real, whatever ids it holds
            max_new_tokens=max_new_tokens,
            eos_token_id=end,
            pad_token_id=task.pad_id,
            streamer=collector,
            **sampling.settings(),
        )
        ended_by = "end" if end is not None and collector.new_ids[-1:] == [end] else "length"
    except KeyboardInterrupt:
        collector.end()
        ended_by = "interrupted"
    return Generation(prompt_ids, collector.new_ids, collector.text, ended_by)


def generate_from_run(
    run: str | Path, prompt: str, *, device: str = "auto", step: int | None = None, **kwargs: Any
) -> Generation:
    """`generate_text` with the model and task of a run folder's newest checkpoint, or of the step asked for."""
    from traformer.models.from_run import load_run

    model, task, _, _ = load_run(run, device=device, step=step)
    return generate_text(model, task, prompt, **kwargs)
