"""Attention as modules: projections, norms, cache, then one op. One file per method, one signature for all.

Every layer class that the catalogue (`traformer.methods`) names can be imported from here; it is loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from traformer.layers.base import AttentionLayer
from traformer.layers.cache import KeyValueCache
from traformer.layers.context import AttentionContext
from traformer.layers.norms import RMSNorm, rms_norm
from traformer.methods import METHODS, resolve_method, stack_of, store_stack

if TYPE_CHECKING:
    from traformer.layers.rope import RotaryAttention
    from traformer.layers.threshold_relative import ThresholdRelativeAttention

__all__ = [
    "AttentionContext",
    "AttentionLayer",
    "KeyValueCache",
    "RMSNorm",
    "RotaryAttention",
    "ThresholdRelativeAttention",
    "check_stack",
    "layer_class",
    "rms_norm",
]


def layer_class(attention: str) -> type[AttentionLayer]:
    """The layer of a method or named configuration."""
    module, _, name = resolve_method(attention).layer.partition(":")
    layer: type[AttentionLayer] = getattr(import_module(module), name)
    return layer


def check_stack(config: Any) -> None:
    """Write the methods of the attention names into a model's configuration; raise for options that cannot be used."""
    store_stack(config)
    for method in stack_of(config):
        layer_class(method.attention).check_options(method.all_options, config.num_attention_heads, config.head_dim)


def __getattr__(name: str) -> Any:
    for method in METHODS.values():
        if method.layer.partition(":")[2] == name:
            return layer_class(method.name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
