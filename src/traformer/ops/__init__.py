"""Attention as functions: tensors in, tensors out."""

from traformer.ops.threshold_relative import (
    AttentionMap,
    AttentionStats,
    KeyIndex,
    attention_map,
    attention_stats,
    available_backends,
    threshold_relative_attention,
)

__all__ = [
    "AttentionMap",
    "AttentionStats",
    "KeyIndex",
    "attention_map",
    "attention_stats",
    "available_backends",
    "threshold_relative_attention",
]
