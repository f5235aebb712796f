"""From names and options to the task and the model they describe, and from a run folder back to both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traformer.errors import InputError, RunError, unknown_name
from traformer.methods import resolve_stack
from traformer.runs.config import RunConfig
from traformer.runs.folder import RunFolder
from traformer.tasks import build_task
from traformer.terminal import warn as show_warning

if TYPE_CHECKING:
    from torch import nn

    from traformer.tasks import Task


CONVERTED = "converted"  # in place of a preset's name: the model is the one that the run starts from, as it is
# What the task and the attention of a run decide of its model.
DECIDED_BY_RUN = ("vocab_size", "pad_token_id", "attention", "attention_options")


def build_model_config(config: RunConfig, task: Task, saved: Path | None = None) -> Any:
    """The preset with the run's attention, the task's vocabulary, and the run's own changes.

    Of a converted model: the configuration in `saved`, a checkpoint of the run, or in the folder it starts from.
    """
    from traformer.models import PRESETS, TraformerConfig

    if config.preset == CONVERTED:
        from traformer.models.pretrained import read_model_config

        model_config = read_model_config(saved or config.from_model or "")
        check_vocabulary(model_config.vocab_size, task, saved or config.from_model)
        return model_config
    resolve_stack(config.attention, config.attention_options)
    if config.preset not in PRESETS:
        raise unknown_name("preset", config.preset, PRESETS)
    decided = (task.vocab_size, task.pad_id, config.attention, dict(config.attention_options))
    settings = dict(zip(DECIDED_BY_RUN, decided, strict=True))
    known = TraformerConfig().to_dict()
    for name in config.model_options:
        if name in settings:
            raise InputError(f"model_options has {name!r}, which the task and attention settings decide; leave it out")
        if name not in known:
            raise unknown_name("model option", name, sorted(known))
    return TraformerConfig.preset(config.preset, **settings, **config.model_options)


def build_model(config: RunConfig, task: Task, saved: Path | None = None) -> Any:
    """A new model, initialised from the run's seed alone; `saved` as in `build_model_config`."""
    import torch

    model_config = build_model_config(config, task, saved)
    torch.manual_seed(config.seed)
    return model_of(model_config)


def model_of(model_config: Any) -> Any:
    """The causal language model that a configuration describes, ours or a converted one, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    from traformer.models import TraformerConfig, TraformerForCausalLM

    if isinstance(model_config, TraformerConfig):
        return TraformerForCausalLM(model_config)
    return AutoModelForCausalLM.from_config(model_config, dtype=torch.float32)


def check_vocabulary(entries: int, task: Task, source: Any) -> None:
    """Refuse tokens that a converted model has no embedding for; it may have more than its tokenizer uses."""
    if task.vocab_size > entries:
        raise InputError(
            f"{source} has a vocabulary of {entries:,} tokens, but the task has {task.vocab_size:,}; give the task "
            "(and tokenizer) that it was trained with"
        )


def load_run(
    path: str | Path, device: str = "auto", step: int | None = None, warn: Callable[[str], None] | None = None
) -> tuple[Any, Task, RunConfig, int]:
    """Model (in eval mode), task, config and step of a run's newest whole checkpoint, or of the step asked for."""
    from torch import nn

    from traformer.devices import choose_device

    folder = RunFolder.open(path)
    config = folder.read_config()
    found = folder.find_checkpoint(step, warn or show_warning)
    task = build_task(config.task, config.task_options)
    task.use_files(folder.path)
    task.check_files(folder.path)
    model = model_of(check_same_model(build_model_config(config, task, found.path), found.path, config))
    load_weights(model, found.path)
    nn.Module.to(model, choose_device(device))
    return model.eval(), task, config, found.step


def check_same_model(expected: Any, folder: Path, config: RunConfig) -> Any:
    """A checkpoint's model config; another model than the run's is refused, since weights of one may fit another."""
    from traformer.models import PRESETS, TraformerConfig

    if config.preset == CONVERTED:
        return expected  # read from this folder

    found = TraformerConfig.from_pretrained(str(folder))
    for name in ("attention", "attention_options", "vocab_size", *PRESETS[config.preset], *config.model_options):
        here, wanted = getattr(found, name, None), getattr(expected, name, None)
        if here != wanted:
            raise RunError(
                f"{folder} has {name} = {here!r}, but the run's config.yaml says {wanted!r}: it is a checkpoint of "
                "another run; remove it"
            )
    return found


def load_weights(model: nn.Module, folder: Path) -> None:
    """A checkpoint's weights into a model of the same shape; every name must be there."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    tied = getattr(model, "all_tied_weights_keys", None) or {}
    try:
        weights = load_file(folder / "model.safetensors")
        weights |= {name: weights[source] for name, source in tied.items() if name not in weights and source in weights}
        model.load_state_dict(weights)
    except SafetensorError as error:
        raise RunError(f"{folder / 'model.safetensors'} is damaged ({error}); copy or save the model again") from None
    except RuntimeError as error:
        detail = " ".join(str(error).split())[:200]
        raise RunError(f"{folder} does not fit the model ({detail}); was it made by another version?") from None
