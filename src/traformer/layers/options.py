"""Options that several methods share: what a value may be, and what it means for each head."""

from __future__ import annotations

import math
from typing import Protocol, TypedDict

from traformer.errors import InputError
from traformer.methods import StackConfig
from traformer.types import Options


class LayerConfig(StackConfig, Protocol):
    """What a layer reads of a model's configuration: ours, or that of a converted model."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int | None: ...
    @property
    def head_dim(self) -> int | None: ...
    @property
    def attention_dropout(self) -> float: ...
    @property
    def embedding_range(self) -> float: ...


class LayerArguments(TypedDict, total=False):
    """Keyword arguments that every layer takes; see AttentionLayer."""

    head_dim: int | None
    qk_norm: bool
    dropout: float
    layer_idx: int
    leader: int | None
    initialize: bool


class ThresholdArguments(LayerArguments, total=False):
    """Keyword arguments that TRA and its variants take; see ThresholdRelativeAttention."""

    threshold: float
    exclude_self: bool | str | list[bool]
    previous_heads: bool | str | list[bool]
    temperature: bool
    tolerance: float
    backend: str


class SoftmaxArguments(LayerArguments, total=False):
    """Keyword arguments that every softmax layer takes; see SoftmaxAttentionLayer."""

    temperature: bool
    exclude_self: bool | str | list[bool]
    previous_heads: bool | str | list[bool]
    sliding_window: int | None


FAST_GATE, SLOW_GATE = -6.0, 6.0  # of gate_bias "halves": the first half of the heads, the second half


def check_shared_options(options: Options, num_heads: int) -> None:
    """Raise InputError for a value of a shared option that cannot be used."""
    check_bool("temperature", options.get("temperature", False))
    window = options.get("sliding_window")
    if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
        raise InputError(f"attention option sliding_window must be a whole number above zero, got {window!r}")
    tolerance = options.get("tolerance", 0.0)
    if not (is_number(tolerance) and 0 <= tolerance < 1):
        raise InputError(f"attention option tolerance must be a number in [0, 1), got {tolerance!r}")
    excluded_heads(options, num_heads)
    gate_biases(options.get("gate_bias"), num_heads)


def check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InputError(f"attention option {name} must be true or false, got {value!r}")


def is_number(x: object) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x)


def chosen_heads(name: str, value: bool | str | list[bool], num_heads: int) -> bool | list[bool]:
    """An option that some heads have, as one bool for all, or one per head."""
    if isinstance(value, bool):
        return value
    if value == "half":
        return [head < num_heads // 2 for head in range(num_heads)]
    if isinstance(value, (list, tuple)) and all(isinstance(x, bool) for x in value):
        if len(value) == num_heads:
            return list(value)
        raise InputError(f"attention option {name} has {len(value)} entries, but the layer has {num_heads} heads")
    raise InputError(f'attention option {name} must be true, false, "half" or a list of bool, got {value!r}')


def previous_heads(options: Options, num_heads: int) -> list[bool] | None:
    """For each head whether it reads the previous token alone; None: no head does."""
    chosen = chosen_heads("previous_heads", options.get("previous_heads", False), num_heads)
    each = [chosen] * num_heads if isinstance(chosen, bool) else chosen
    return each if any(each) else None


def excluded_heads(options: Options, num_heads: int) -> bool | list[bool]:
    """Whether the query's own key is left out, for all heads or for each; also where only the previous one is read."""
    chosen = chosen_heads("exclude_self", options.get("exclude_self", False), num_heads)
    previous = previous_heads(options, num_heads)
    if previous is None:
        return chosen
    each = [chosen] * num_heads if isinstance(chosen, bool) else chosen
    return [a or b for a, b in zip(each, previous, strict=True)]


def gate_biases(option: float | str | list[float] | None, num_heads: int) -> list[float] | None:
    """The option `gate_bias`, one number per head; None: torch's own start."""
    if option is None:
        return None
    if option == "halves":
        return [FAST_GATE if head < num_heads // 2 else SLOW_GATE for head in range(num_heads)]
    if is_number(option):
        return [float(option)] * num_heads  # type: ignore[arg-type]
    if isinstance(option, (list, tuple)) and all(map(is_number, option)):
        if len(option) == num_heads:
            return [float(bias) for bias in option]
        raise InputError(f"attention option gate_bias has {len(option)} entries, but the layer has {num_heads} heads")
    raise InputError(f'attention option gate_bias must be a number, a list of numbers or "halves", got {option!r}')
