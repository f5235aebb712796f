"""Threshold Relative Attention: one function, several backends that give the same result."""

from traformer.ops.threshold_relative.api import (
    AttentionMap,
    AttentionStats,
    attention_map,
    attention_stats,
    threshold_relative_attention,
)
from traformer.ops.threshold_relative.backends import available_backends
from traformer.ops.threshold_relative.key_index import KeyIndex

__all__ = [
    "AttentionMap",
    "AttentionStats",
    "KeyIndex",
    "attention_map",
    "attention_stats",
    "available_backends",
    "threshold_relative_attention",
]
