"""RunConfig: everything needed to repeat a run, as a dataclass and as `config.yaml`. Loads without torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from traformer.errors import InputError, RunError, unknown_name

# Sections of config.yaml that describe where a run was made; they are records, not settings.
RECORDS = ("versions", "environment")
# Settings that may differ when a run is resumed, because they do not change what is computed (or only its rounding).
CHANGEABLE = frozenset({"save_every", "keep", "threads", "device", "accumulate", "tensorboard"})
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class RunConfig:
    """The settings of one training run."""

    task: str = "flip_flop"
    task_options: dict[str, Any] = field(default_factory=dict)
    attention: str = "tra"
    attention_options: dict[str, Any] = field(default_factory=dict)
    preset: str = "mini"
    model_options: dict[str, Any] = field(default_factory=dict)  # override the preset, in TraformerConfig's names
    steps: int = 2000
    batch_size: int = 64  # examples a step, over all processes and accumulation
    accumulate: int = 1  # micro-batches a step: less memory, the same gradient to rounding
    lr: float = 1e-4  # the peak, reached after the warm-up
    warmup: float = 0.05  # share of the steps in which lr rises linearly; afterwards a cosine falls to min_lr
    min_lr: float = 0.0
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    clip: float | None = None  # largest gradient norm, None: gradients are left as they are
    seed: int = 0
    dtype: str = "float32"  # "bfloat16": autocast; weights and optimizer stay float32
    log_every: int = 50
    save_every: int = 500
    keep: int = 2  # checkpoints kept, the newest ones
    threads: int | None = None  # of torch on the CPU, None: torch's own choice
    device: str = "auto"
    tensorboard: bool = False

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            object.__setattr__(self, item.name, _checked(item.name, str(item.type), getattr(self, item.name)))
        for name in ("steps", "batch_size", "accumulate", "log_every", "save_every", "keep"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; give a whole number above zero")
        for name, low, high in (
            ("lr", 0.0, math.inf), ("warmup", 0.0, 1.0), ("min_lr", 0.0, self.lr), ("weight_decay", 0.0, math.inf),
            ("beta1", 0.0, 1.0), ("beta2", 0.0, 1.0), ("clip", 0.0, math.inf), ("threads", 1, math.inf),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise InputError(f"{name} is {value}; it must lie between {low:g} and {high:g}")
        if not 0 <= self.seed < 2**31:
            raise InputError(f"seed is {self.seed}; it must lie between 0 and 2**31 - 1")
        if self.batch_size % self.accumulate:
            raise InputError(f"accumulate {self.accumulate} does not divide batch_size {self.batch_size}")
        if self.dtype not in DTYPES:
            raise unknown_name("dtype", self.dtype, DTYPES)
        if self.task == "text":
            from traformer.tasks import task_class

            object.__setattr__(self, "task_options", task_class(self.task).stored_options(self.task_options))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str = "the config") -> RunConfig:
        known = [item.name for item in dataclasses.fields(cls)]
        for name in values:
            if name not in known and name not in RECORDS:
                raise InputError(f"{source}: {unknown_name('setting', name, known)}")
        return cls(**{name: value for name, value in values.items() if name not in RECORDS})

    @classmethod
    def from_file(cls, path: str | Path) -> RunConfig:
        return cls.from_dict(read_yaml(path), str(path))

    def to_dict(self) -> dict[str, Any]:
        return {item.name: _plain(getattr(self, item.name)) for item in dataclasses.fields(self)}

    def replace(self, **changes: Any) -> RunConfig:
        return dataclasses.replace(self, **changes)

    def for_resume(self, given: Mapping[str, Any], folder: Path) -> RunConfig:
        """This config with the changeable settings of `given`; a setting that would make it another run is refused."""
        wanted = self.replace(**given)  # checked and spelled out as this one is
        for name in given:
            stored, value = getattr(self, name), getattr(wanted, name)
            if name not in CHANGEABLE and value != stored:
                raise RunError(
                    f"{folder} was started with {name} = {stored!r}, not {value!r}; leave it out,"
                    " or train into another folder"
                )
        return wanted


def read_yaml(path: str | Path) -> dict[str, Any]:
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


def _plain(value: Any) -> Any:
    """Tuples as lists, recursively: what YAML holds and gives back."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _checked(name: str, kind: str, value: Any) -> Any:
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
            return dict(_plain(value))
    except (TypeError, ValueError, OverflowError):
        pass
    raise InputError(f"{name} is {value!r}; it must be of type {base.split('[')[0]}")
