"""Attention as modules: projections, norms, cache, then one op. One file a method, one signature for all."""

from __future__ import annotations

from traformer.layers.base import AttentionContext, AttentionLayer
from traformer.layers.norms import RMSNorm, rms_norm
from traformer.layers.rope import RotaryAttention
from traformer.layers.threshold_relative import ThresholdRelativeAttention

# A new method: one line here, and the shared tests pick it up.
ATTENTIONS: dict[str, type[AttentionLayer]] = {
    layer.name: layer
    for layer in (
        ThresholdRelativeAttention,
        RotaryAttention,
    )
}

__all__ = [
    "ATTENTIONS",
    "AttentionContext",
    "AttentionLayer",
    "RMSNorm",
    "RotaryAttention",
    "ThresholdRelativeAttention",
    "rms_norm",
]
