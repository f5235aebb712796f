"""A run whose model is loaded, and the measurements that are made of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from traformer.evaluation.watcher import Watcher
from traformer.methods import Method, stack_of
from traformer.models.from_run import load_run
from traformer.runs.config import RunConfig
from traformer.runs.folder import RunFolder
from traformer.runs.measurements import Measurement, Request
from traformer.runs.metrics import metric_named
from traformer.tasks.base import Split, Task
from traformer.tasks.metrics import ANSWER_METRICS, Tally
from traformer.types import JsonObject, Options


@dataclass
class OpenedRun:
    """A run folder with its model in eval mode."""

    folder: RunFolder
    model: Any  # ours or a converted one
    task: Task
    config: RunConfig
    step: int

    @classmethod
    def open(
        cls, path: str | Path, device: str = "auto", step: int | None = None, watcher: Watcher | None = None
    ) -> OpenedRun:
        """The newest whole checkpoint of a run, or that of the step asked for."""
        folder = RunFolder.open(path)
        model, task, config, found = load_run(path, device=device, step=step, warn=(watcher or Watcher()).say)
        return cls(folder, model, task, config, found)

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.model.parameters()).device
        return device

    @property
    def methods(self) -> list[Method]:
        """The attention of each layer, with what it can do."""
        return stack_of(self.model.config)

    @property
    def weighs_keys(self) -> bool:
        """Whether every layer has attention weights to look at."""
        return all(method.has_weights for method in self.methods)

    @property
    def train_length(self) -> int:
        """The longest length of training, in the task's unit."""
        return self.task.length_range[1]

    def measurement(
        self, request: Request, metric: str, value: float | None, low: float | None = None, high: float | None = None,
        **more: Any,
    ) -> Measurement:  # fmt: skip
        """A number that answers a request about this run."""
        settings: JsonObject = {
            "task": self.config.task, "split": request.split, "length": request.length, "examples": request.examples,
            "seed": request.seed, "attention": self.config.attention, "step": self.step,
            "train_length": self.train_length, "study": request.study, "protocol": request.protocol,
        }  # fmt: skip
        return Measurement(metric=metric, value=value, low=low, high=high, **{**settings, **more})

    def answer_measurements(self, request: Request, split: Split, tally: Tally, group: str = "") -> list[Measurement]:
        """Every metric of the task, from a tally of its answers, with chance beside it."""
        name = f"{request.split}/{group}" if group else request.split
        made = []
        for metric in self.task.metrics:
            share = ANSWER_METRICS[metric](tally)
            chance = None
            if metric_named(metric).has_chance:
                chance = split.task.group_chance(metric, group) if group else split.task.chance(metric)
            more = {"split": name, "counted": share.count, "chance": chance}
            made.append(self.measurement(request, metric, share.value, share.low, share.high, **more))
        return made


@dataclass(frozen=True)
class EvaluationOptions:
    """What `tra eval` can be asked for; an evaluator refuses what it has no use for."""

    lengths: str | Iterable[int | str] | None = None
    examples: int = 256
    seed: int | None = None
    batch_tokens: int | None = None
    count_overlap: bool | None = None
    again: bool = False
    evaluator_options: Options = field(default_factory=dict)
