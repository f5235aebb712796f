"""Threshold Relative Attention: one function, several backends that give the same result."""

from traformer.ops.threshold_relative.api import (
    AttentionMap,
    AttentionStats,
    attention_map,
    attention_stats,
    threshold_relative_attention,
)
from traformer.ops.threshold_relative.backends import available_backends

__all__ = [
    "AttentionMap",
    "AttentionStats",
    "attention_map",
    "attention_stats",
    "available_backends",
    "threshold_relative_attention",
]
