"""Adaptive scalable entmax (ASEntmax) with NAPE."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor, nn

from traformer.layers.alibi import slope_bias
from traformer.layers.context import AttentionContext
from traformer.layers.eager import EagerAttentionLayer
from traformer.layers.options import LayerArguments
from traformer.ops.asentmax import adaptive_scale, nape_slopes
from traformer.ops.entmax import entmax_attention


class AdaptiveEntmaxAttention(EagerAttentionLayer):
    """1.5-entmax with a learned, length-dependent sharpness; ALiBi in half of the heads, no position in the others.

    Source: Vasylenko et al. 2026, "Long-Context Generalization with Sparse Attention", and the authors' code. Weights
    are the 1.5-entmax of the logits, so keys far below the best get exactly 0. NAPE: the first half of the heads has
    ALiBi with slopes 1, 1/2, 1/3, ..., the others have no position; on these the scores are multiplied by delta +
    beta (log n)^gamma with beta = softplus(w_b . x), gamma = gamma_range * tanh(w_g . x) from the query's token (two
    Linears without bias, torch's default init), delta = 1, and n = the query's position + 2 (their code's offset,
    which keeps log n above 0).
    Path: eager torch, Newton's method for the threshold and its closed-form backward, in blocks of queries.

    Option gamma_range: 2, the authors' default.
    """

    name = "asentmax"

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        gamma_range: float = 2.0,
        **more: Unpack[LayerArguments],
    ) -> None:
        super().__init__(embed_dim, num_heads, num_kv_heads, gamma_range=gamma_range, **more)

    def add_parameters(self) -> None:
        super().add_parameters()
        self.slopes = nape_slopes(self.num_heads)
        self.num_alibi_heads = self.num_heads // 2
        scaled = self.num_heads - self.num_alibi_heads
        self.beta_proj = nn.Linear(self.embed_dim, scaled, bias=False)
        self.gamma_proj = nn.Linear(self.embed_dim, scaled, bias=False)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, hidden_states: Tensor, context: AttentionContext
    ) -> tuple[Tensor, Tensor | None]:
        position = context.positions(q.shape[2], q.device)
        beta, gamma = self.beta_proj(hidden_states), self.gamma_proj(hidden_states)
        factor = adaptive_scale(beta, gamma, position, 1.0, self.option["gamma_range"]).to(q.dtype)
        near, free = q[:, : self.num_alibi_heads], q[:, self.num_alibi_heads :]
        q = torch.cat((near, free * factor), dim=1)
        bias = slope_bias(self.slopes, k, context)
        own = context.of_own_keys(bias, q.shape[2])
        return entmax_attention(q, k, v, bias, own, self.visible(context), **self.settings(context))
