"""RunConfig: everything needed to repeat a run, as a dataclass and as `config.yaml`. Loads without torch.

A setting is one line here: its default, what it means, its limits. `tra train` makes its flags and their help from it.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from traformer.errors import InputError, RunError, unknown_name
from traformer.types import JsonObject, Options

# Sections of config.yaml that describe where a run was made; they are records, not settings.
RECORDS = ("versions", "environment")


@dataclass(frozen=True)
class Setting:
    """What a field of RunConfig means, where it appears in `tra train --help`, and which values it takes."""

    group: str
    help: str
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()
    flag: str = ""  # where it is not the field's name
    unless_given: str = ""  # what None stands for
    changeable: bool = False  # may differ when a run is resumed: it does not change what is computed, or only rounding

    def fault(self, value: Any) -> str | None:
        """What is wrong with a value of the right type, or None."""
        limits = [
            (self.least, value is not None and self.least is not None and value < self.least, "at least"),
            (self.above, value is not None and self.above is not None and value <= self.above, "above"),
            (self.most, value is not None and self.most is not None and value > self.most, "at most"),
            (self.below, value is not None and self.below is not None and value >= self.below, "below"),
        ]
        if not any(broken for _, broken, _ in limits):
            return None
        wanted = " and ".join(f"{word} {limit:g}" for limit, _, word in limits if limit is not None)
        return f"it must be {wanted}" + (f", or left out for {self.unless_given}" if self.unless_given else "")


def _setting(default: Any, group: str, help: str, **more: Any) -> Any:
    return field(default=default, metadata=_about(group, help, **more))


def _about(group: str, help: str, **more: Any) -> dict[str, Setting]:
    return {"setting": Setting(group, help, **more)}


_TASK, _MODEL, _OPTIMISATION, _MACHINE = "task", "model", "optimisation", "machine and logging"
_DISTILLATION = "tuning a converted model"


@dataclass(frozen=True)
class RunConfig:
    """The settings of one training run."""

    task: str = _setting("flip_flop", _TASK, "what to learn; `tra list tasks` has the names")
    task_options: dict[str, Any] = field(
        default_factory=dict, metadata=_about(_TASK, "an option of the task; `tra list --options TASK` has them")
    )
    attention: str = _setting(
        "tra",
        _MODEL,
        "the attention (`tra list attentions`), or several separated by commas: a pattern over the layers",
    )
    attention_options: dict[str, Any] = field(
        default_factory=dict,
        metadata=_about(_MODEL, "an option of the attention; `tra list --options ATTENTION` has them"),
    )
    preset: str = _setting("mini", _MODEL, "the model's size; `tra list presets` has the names")
    model_options: dict[str, Any] = field(
        default_factory=dict,
        metadata=_about(
            _MODEL, "a setting of TraformerConfig in place of the preset's; `tra list --options model` has them"
        ),
    )
    from_model: str | None = _setting(
        None,
        _MODEL,
        "start from the weights and shape of this run or saved model; a run also gives its task and tokenizer",
        flag="--from",
        unless_given="weights drawn from the seed",
    )
    objective: str = _setting(
        "answers",
        _DISTILLATION,
        "answers: cross-entropy of the tokens; layers: each new attention layer learns to give what the teacher's gave "
        "for the same input; logits: the model learns the teacher's probabilities",
        choices=("answers", "layers", "logits"),
    )
    teacher: str | None = _setting(
        None,
        _DISTILLATION,
        "the model to learn from: the one that was converted (a folder, a GGUF file or a hub name)",
        unless_given="none",
    )
    teacher_weight: float = _setting(
        1.0,
        _DISTILLATION,
        "with --objective logits: share of the loss that is the distance to the teacher; the rest is the tokens' loss",
        least=0,
        most=1,
    )
    train_only: str = _setting(
        "all",
        _DISTILLATION,
        "which weights learn: all, or those of the attention layers (always so with --objective layers)",
        choices=("all", "attention"),
    )
    lora: int | None = _setting(
        None,
        _DISTILLATION,
        "rank of low-rank updates: the matrices named by --train-only stay as they are and an update of this rank is "
        "added to each",
        least=1,
        unless_given="the matrices themselves learn",
    )
    steps: int = _setting(2000, _OPTIMISATION, "optimizer steps", least=1)
    batch_size: int = _setting(64, _OPTIMISATION, "examples per step, over all processes", least=1)
    accumulate: int = _setting(
        1, _OPTIMISATION, "micro-batches per step: less memory, the same gradient to rounding", least=1, changeable=True
    )
    lr: float = _setting(1e-4, _OPTIMISATION, "peak learning rate of AdamW", above=0)
    warmup: float = _setting(
        0.05, _OPTIMISATION, "share of the steps in which the rate rises; then it falls along a cosine", least=0, most=1
    )
    min_lr: float = _setting(0.0, _OPTIMISATION, "learning rate at the end of the cosine", least=0)
    weight_decay: float = _setting(0.01, _OPTIMISATION, "weight decay of AdamW", least=0)
    beta1: float = _setting(0.9, _OPTIMISATION, "decay of AdamW's mean of gradients", least=0, below=1)
    beta2: float = _setting(0.999, _OPTIMISATION, "decay of AdamW's mean of squared gradients", least=0, below=1)
    curriculum: float = _setting(
        0.0,
        _OPTIMISATION,
        "share of the steps in which the longest training length grows from the shortest to --length; 0: all lengths "
        "from the start",
        least=0,
        most=1,
    )
    clip: float | None = _setting(None, _OPTIMISATION, "largest gradient norm", above=0, unless_given="no clipping")
    seed: int = _setting(0, _OPTIMISATION, "seed of the weights, examples and dropout", least=0, below=2**31)
    dtype: str = _setting(
        "float32",
        _OPTIMISATION,
        "precision of the computation; bfloat16 means autocast, with weights and optimizer in float32",
        choices=("float32", "bfloat16"),
    )
    log_every: int = _setting(50, _MACHINE, "steps between lines of metrics.jsonl", least=1)
    save_every: int = _setting(500, _MACHINE, "steps between checkpoints", least=1, changeable=True)
    keep: int = _setting(2, _MACHINE, "number of newest checkpoints to keep", least=1, changeable=True)
    threads: int | None = _setting(
        None, _MACHINE, "CPU threads for torch", least=1, unless_given="torch's choice", changeable=True
    )
    device: str = _setting("auto", _MACHINE, "cpu, cuda, cuda:1, or auto: a GPU if there is one", changeable=True)
    tensorboard: bool = _setting(False, _MACHINE, "also write TensorBoard files", changeable=True)

    def __post_init__(self) -> None:
        if isinstance(self.attention, (list, tuple)):  # one per layer, or a pattern that repeats
            object.__setattr__(self, "attention", ",".join(map(str, self.attention)))
        for item in dataclasses.fields(self):
            value = _checked(item.name, str(item.type), getattr(self, item.name))
            object.__setattr__(self, item.name, value)
            about = setting_of(item)
            if about.choices and value not in about.choices:
                raise unknown_name(item.name, value, about.choices)
            if fault := about.fault(value):
                raise InputError(f"{item.name} is {value}; {fault}")
        if self.min_lr > self.lr:
            raise InputError(f"min_lr is {self.min_lr}; it must be at most lr, which is {self.lr:g}")
        if self.batch_size % self.accumulate:
            raise InputError(f"accumulate {self.accumulate} does not divide batch_size {self.batch_size}")
        if self.from_model is not None:
            object.__setattr__(self, "from_model", os.path.abspath(os.path.expanduser(self.from_model)))
        self._check_distillation()
        from traformer.tasks import TASKS

        if self.task in TASKS:
            object.__setattr__(self, "task_options", TASKS[self.task].stored_options(self.task_options))

    def _check_distillation(self) -> None:
        if self.teacher is not None:
            place = os.path.expanduser(self.teacher)
            object.__setattr__(self, "teacher", os.path.abspath(place) if os.path.exists(place) else self.teacher)
        if (self.objective == "answers") != (self.teacher is None):
            missing = "a teacher, and none is given" if self.teacher is None else "no teacher, and one is given"
            raise InputError(f"objective {self.objective!r} needs {missing}; see --objective and --teacher")
        if self.teacher_weight < 1 and self.objective != "logits":
            raise InputError(f"teacher_weight is for objective 'logits', not {self.objective!r}; leave it out")
        if self.from_model is None and (self.teacher is not None or self.lora or self.train_only != "all"):
            raise InputError("a teacher, lora and train_only are for a model that has learned already; give --from")

    @classmethod
    def from_dict(cls, values: Options, source: str = "the config") -> RunConfig:
        known = [item.name for item in dataclasses.fields(cls)]
        for name in values:
            if name not in known and name not in RECORDS:
                raise InputError(f"{source}: {unknown_name('setting', name, known)}")
        return cls(**{name: value for name, value in values.items() if name not in RECORDS})

    @classmethod
    def from_file(cls, path: str | Path) -> RunConfig:
        return cls.from_dict(read_yaml(path), str(path))

    def to_dict(self) -> JsonObject:
        return {item.name: _plain(getattr(self, item.name)) for item in dataclasses.fields(self)}

    def replace(self, **changes: Any) -> RunConfig:
        return dataclasses.replace(self, **changes)

    def for_resume(self, given: Options, folder: Path) -> RunConfig:
        """This config with the changeable settings of `given`; a setting that would make it another run is refused."""
        wanted = self.replace(**given)  # checked and spelled out as this one is
        for item in dataclasses.fields(self):
            stored, value = getattr(self, item.name), getattr(wanted, item.name)
            if not setting_of(item).changeable and value != stored:
                raise RunError(
                    f"{folder} was started with {item.name} = {stored!r}, not {value!r}; leave it out,"
                    " or train into another folder"
                )
        return wanted


def flag_of(item: dataclasses.Field[Any]) -> str:
    """The flag of `tra train` that sets a field; options are given one by one."""
    name = "--" + item.name.replace("_", "-")
    return setting_of(item).flag or (name.removesuffix("s") if item.name.endswith("_options") else name)


def setting_of(item: dataclasses.Field[Any]) -> Setting:
    """What a field of RunConfig means."""
    about: Setting = item.metadata["setting"]
    return about


def is_changeable(name: str) -> bool:
    """Whether a setting may differ when a run is resumed."""
    item = RunConfig.__dataclass_fields__.get(name)
    return item is not None and setting_of(item).changeable


def read_yaml(path: str | Path) -> JsonObject:
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        first = str(error).splitlines()[0]
        raise RunError(f"{path} is not readable YAML: {first}") from error
    if not isinstance(values, dict):
        raise RunError(f"{path} does not hold settings of the form name: value")
    return values


def _plain(value: object) -> object:
    """Tuples as lists, recursively: what YAML holds and gives back."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _checked(name: str, kind: str, value: Any) -> object:
    """The value in the field's type; YAML reads 1e-3 as text, so text that is a number counts as one."""
    if value is None and "None" in kind:
        return None
    base = kind.split(" | ")[0]
    try:
        if base == "int" and not isinstance(value, bool) and int(value) == float(value):
            return int(value)
        if base == "float" and not isinstance(value, bool) and math.isfinite(float(value)):
            return float(value)
        if base == "bool" and isinstance(value, bool):
            return value
        if base == "str" and isinstance(value, str):
            return value
        if base.startswith("dict") and isinstance(value, Mapping):
            return {str(key): _plain(item) for key, item in value.items()}
    except (TypeError, ValueError, OverflowError):
        pass
    raise InputError(f"{name} is {value!r}; it must be {_KINDS[base.split('[')[0]]}")


_KINDS = {
    "int": "a whole number",
    "float": "a finite number",
    "bool": "true or false",
    "str": "text",
    "dict": "settings of the form name: value",
}
