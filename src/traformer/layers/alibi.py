"""ALiBi: attention with linear biases."""

from __future__ import annotations

import torch
from torch import Tensor

from traformer.layers.context import AttentionContext
from traformer.layers.softmax import SoftmaxAttentionLayer
from traformer.ops.alibi import alibi_slopes
from traformer.ops.eager import widest


class AlibiAttention(SoftmaxAttentionLayer):
    """Softmax attention with a penalty proportional to distance, one fixed slope per head.

    Source: Press, Smith, Lewis 2022, "Train Short, Test Long": logit_ij = s_ij - m_h (i - j), slopes m_h = 2^(-8h/n),
    for a number of heads that is not a power of two interleaved as in the authors' code. No parameters, no other
    position embedding.
    Path: m_h * j is channels of the key and m_h * i of the query (constant within a row, but near keys are exact only
    relative to it), so torch's fused causal kernel runs without a bias matrix.
    """

    name = "alibi"

    def add_parameters(self) -> None:
        super().add_parameters()
        self.slopes = alibi_slopes(self.num_heads)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, hidden_states: Tensor, context: AttentionContext
    ) -> tuple[Tensor, Tensor | None]:
        return self.key_biased_attention(q, k, v, context, slope_bias(self.slopes, k, context))


def slope_bias(slopes: list[float], k: Tensor, context: AttentionContext) -> Tensor:
    """slope_h * position of the key, [B or 1, H, Tk], in fp64."""
    positions = context.key_positions(k.device, k.shape[2])
    return torch.tensor(slopes, device=k.device, dtype=widest(k.device))[:, None] * positions[:, None, :]
