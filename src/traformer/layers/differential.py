"""The Differential Transformer's attention."""

from __future__ import annotations

import math
from typing import Unpack

import torch
from torch import Tensor, nn

from traformer.errors import InputError
from traformer.layers.context import AttentionContext
from traformer.layers.norms import RMSNorm
from traformer.layers.options import SoftmaxArguments
from traformer.layers.rotary_option import check_rotary, rotary_tables, turned
from traformer.layers.softmax import SoftmaxAttentionLayer
from traformer.types import Options


def start_of_factor(layer_idx: int) -> float:
    """lambda_init of a layer, counted from 0."""
    return 0.8 - 0.6 * math.exp(-0.3 * layer_idx)


def difference_factor(vectors: Tensor, start: float) -> Tensor:
    """lambda = exp(a1 . b1) - exp(a2 . b2) + start, 0-dim; vectors [4, d] are a1, b1, a2, b2."""
    a1, b1, a2, b2 = vectors.float().unbind(0) if vectors.dtype.itemsize < 4 else vectors.unbind(0)
    return (a1 * b1).sum().exp() - (a2 * b2).sum().exp() + start


class DifferentialAttention(SoftmaxAttentionLayer):
    """The difference of two softmax attentions over the two halves of each head's channels, with RoPE.

    Source: Ye et al. 2025, "Differential Transformer", and the authors' code: out = (softmax(q1.k1) - lambda
    softmax(q2.k2)) v, then an RMS norm over each head (eps 1e-5, a learned scale shared by the heads) times (1 -
    lambda_init); lambda = exp(a1.b1) - exp(a2.b2) + lambda_init with four learned vectors per layer (normal, std 0.1)
    and lambda_init = 0.8 - 0.6 exp(-0.3 layer), layers from 0. A head of ours (D channels of value) is one of theirs:
    q1, q2, k1, k2 have D/2 channels, so sizes and parameters equal those of the other methods. RoPE turns each half,
    as in the paper (theta 500,000). QK-norm, which the paper does not use, norms a head's two halves together.
    Path: two calls of torch's fused attention, halves filled up with zeros to the width of the values.

    Options: position ("rope" or "none"), theta.
    """

    name = "differential"

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        position: str = "rope",
        theta: float = 500_000.0,
        **more: Unpack[SoftmaxArguments],
    ) -> None:
        super().__init__(embed_dim, num_heads, num_kv_heads, position=position, theta=theta, **more)

    def add_parameters(self) -> None:
        super().add_parameters()
        half = self.head_dim // 2
        self.half_scale = 1.0 / math.sqrt(half)
        self.start = start_of_factor(self.layer_idx)
        self.factor_vectors = nn.Parameter(torch.zeros(4, half))  # a1, b1, a2, b2
        self.head_norm = RMSNorm(self.head_dim, eps=1e-5)

    @classmethod
    def check_options(cls, options: Options, num_heads: int, head_dim: int) -> None:
        super().check_options(options, num_heads, head_dim)
        if head_dim % 2:
            raise InputError(f"attention 'differential' halves each head: head_dim must be even, not {head_dim}")
        check_rotary(cls.name, head_dim // 2, options)

    def reset_own_parameters(self) -> None:
        super().reset_own_parameters()
        nn.init.normal_(self.factor_vectors, std=0.1)

    def make_tables(self, context: AttentionContext, hidden_states: Tensor) -> tuple[Tensor, ...]:
        return rotary_tables(context, hidden_states, self.head_dim // 2, self.option)

    def place(self, q: Tensor, k: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor]:
        def turn(x: Tensor) -> Tensor:
            return torch.cat([turned(half, self.tables(context)) for half in x.chunk(2, dim=-1)], dim=-1)

        return turn(q), turn(k)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, hidden_states: Tensor, context: AttentionContext
    ) -> tuple[Tensor, Tensor | None]:
        # Zeros in the other half of q leave q1.k1 (or q2.k2) alone: the kernel gets q, k and v of one width.
        first, second = q.chunk(2, dim=-1)
        zeros = torch.zeros_like(first)
        out1, weights1 = self.softmax_attention(torch.cat((first, zeros), -1), k, v, context, self.half_scale)
        out2, weights2 = self.softmax_attention(torch.cat((zeros, second), -1), k, v, context, self.half_scale)
        factor = difference_factor(self.factor_vectors, self.start)
        out = self.head_norm(out1 - factor.to(out2.dtype) * out2) * (1.0 - self.start)
        if weights1 is None or weights2 is None:
            return out, None
        return out, weights1 - factor.to(weights2.dtype) * weights2
