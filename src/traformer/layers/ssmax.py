"""Scalable softmax (SSMax)."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor, nn

from traformer.layers.context import AttentionContext
from traformer.layers.options import SoftmaxArguments
from traformer.layers.rotary_option import check_rotary, rotary_tables, turned
from traformer.layers.softmax import SoftmaxAttentionLayer
from traformer.types import Options


def length_scale(scale: Tensor, seen: Tensor) -> Tensor:
    """s_h * log n: scale [H], keys seen by each query [B, T] -> factor on the scores [B, H, T, 1]."""
    return scale[:, None, None] * seen.to(scale.dtype).log()[:, None, :, None]


class ScalableSoftmaxAttention(SoftmaxAttentionLayer):
    """Softmax whose sharpness grows with the logarithm of the number of keys: scalable softmax, with RoPE.

    Source: Nakanishi 2025, "Scalable-Softmax Is Superior for Attention": scores are multiplied by s_h * log n, n the
    number of keys the query sees, s_h learned. s_h starts at init_scale = 0.168, where s log n averages 1 over
    lengths up to 1024, as the paper initialises it. RoPE gives the position, as in the paper's models (theta 500,000,
    as our RoPE).
    Path: the factor is put on the query, then torch's fused attention.

    Options: init_scale; position ("rope" or "none"), theta.
    """

    name = "ssmax"

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        init_scale: float = 0.168,
        position: str = "rope",
        theta: float = 500_000.0,
        **more: Unpack[SoftmaxArguments],
    ) -> None:
        super().__init__(
            embed_dim, num_heads, num_kv_heads, init_scale=init_scale, position=position, theta=theta, **more
        )

    def add_parameters(self) -> None:
        super().add_parameters()
        self.log_scale = nn.Parameter(torch.full((self.num_heads,), float(self.option["init_scale"])))

    @classmethod
    def check_options(cls, options: Options, num_heads: int, head_dim: int) -> None:
        super().check_options(options, num_heads, head_dim)
        check_rotary(cls.name, head_dim, options)

    def reset_own_parameters(self) -> None:
        super().reset_own_parameters()
        nn.init.constant_(self.log_scale, float(self.option["init_scale"]))

    def make_tables(self, context: AttentionContext, hidden_states: Tensor) -> tuple[Tensor, ...]:
        return rotary_tables(context, hidden_states, self.head_dim, self.option)

    def place(self, q: Tensor, k: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor]:
        return turned(q, self.tables(context)), turned(k, self.tables(context))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, hidden_states: Tensor, context: AttentionContext
    ) -> tuple[Tensor, Tensor | None]:
        seen = context.positions(q.shape[2], q.device) + 1  # [B or 1, T]
        q = q * length_scale(self.log_scale, seen).to(q.dtype)
        return super().attend(q, k, v, hidden_states, context)
