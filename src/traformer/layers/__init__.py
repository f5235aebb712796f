"""Attention as modules: projections, norms, cache, then one op. One file a method, one signature for all."""

from __future__ import annotations

from traformer.layers.absolute import LearnedPositionAttention, SinusoidalAttention
from traformer.layers.alibi import AlibiAttention
from traformer.layers.base import AttentionContext, AttentionLayer
from traformer.layers.cope import ContextualPositionAttention
from traformer.layers.forgetting import ForgettingAttention
from traformer.layers.nope import NoPositionAttention
from traformer.layers.norms import RMSNorm, rms_norm
from traformer.layers.rope import RotaryAttention
from traformer.layers.stick_breaking import StickBreakingAttention
from traformer.layers.threshold_relative import ThresholdRelativeAttention

# A new method: one line here, and the shared tests pick it up.
ATTENTIONS: dict[str, type[AttentionLayer]] = {
    layer.name: layer
    for layer in (
        ThresholdRelativeAttention,
        RotaryAttention,
        NoPositionAttention,
        SinusoidalAttention,
        LearnedPositionAttention,
        AlibiAttention,
        ContextualPositionAttention,
        ForgettingAttention,
        StickBreakingAttention,
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
