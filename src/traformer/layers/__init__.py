"""Attention as modules: projections, norms, cache, then one op. One file a method, one signature for all."""

from __future__ import annotations

from traformer.layers.absolute import LearnedPositionAttention, SinusoidalAttention
from traformer.layers.alibi import AlibiAttention
from traformer.layers.asentmax import AdaptiveEntmaxAttention
from traformer.layers.base import AttentionContext, AttentionLayer
from traformer.layers.cope import ContextualPositionAttention
from traformer.layers.differential import DifferentialAttention
from traformer.layers.fire import FireAttention
from traformer.layers.forgetting import ForgettingAttention
from traformer.layers.lstm import LSTMLayer
from traformer.layers.named import NAMED, stands_for
from traformer.layers.nope import NoPositionAttention
from traformer.layers.norms import RMSNorm, rms_norm
from traformer.layers.rope import RotaryAttention
from traformer.layers.selective import SelectiveAttention
from traformer.layers.ssmax import ScalableSoftmaxAttention
from traformer.layers.stick_breaking import StickBreakingAttention
from traformer.layers.t5 import T5BiasAttention
from traformer.layers.threshold_relative import ThresholdRelativeAttention
from traformer.layers.threshold_variants import ThresholdVariantAttention

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
        T5BiasAttention,
        FireAttention,
        ContextualPositionAttention,
        ForgettingAttention,
        StickBreakingAttention,
        SelectiveAttention,
        ScalableSoftmaxAttention,
        AdaptiveEntmaxAttention,
        DifferentialAttention,
        LSTMLayer,
        ThresholdVariantAttention,
    )
}


def attention_names() -> list[str]:
    """Every name that a config's `attention` may be: the methods, then the named configurations."""
    return [*ATTENTIONS, *NAMED]


__all__ = [
    "ATTENTIONS",
    "NAMED",
    "AttentionContext",
    "AttentionLayer",
    "RMSNorm",
    "RotaryAttention",
    "ThresholdRelativeAttention",
    "attention_names",
    "rms_norm",
    "stands_for",
]
