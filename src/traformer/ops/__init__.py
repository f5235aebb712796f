"""Attention as functions: tensors in, tensors out."""

from traformer.versions import require

require("torch")

from traformer.ops.threshold_relative import (
    AttentionMap,
    AttentionStats,
    KeyIndex,
    attention_map,
    attention_stats,
    available_backends,
    threshold_relative_attention,
)
from traformer.processor import avoid_broken_amx

avoid_broken_amx()  # after torch was loaded, before oneDNN first looks at the processor

__all__ = [
    "AttentionMap",
    "AttentionStats",
    "KeyIndex",
    "attention_map",
    "attention_stats",
    "available_backends",
    "threshold_relative_attention",
]
