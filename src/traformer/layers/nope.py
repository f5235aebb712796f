"""No position embedding at all (NoPE)."""

from __future__ import annotations

from traformer.layers.softmax import SoftmaxAttentionLayer


class NoPositionAttention(SoftmaxAttentionLayer):
    """Softmax attention without any position embedding: order is known from the causal mask alone.

    Source: Kazemnejad et al. 2023, "The Impact of Positional Encoding on Length Generalization in Transformers". No
    parameters beyond the projections. torch's fused attention on every device.
    """

    name = "nope"
