"""Scalable softmax (SSMax)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from traformer.layers.base import AttentionContext
from traformer.layers.rotary_option import check_rotary, rotary_tables, turned
from traformer.layers.softmax import SoftmaxAttentionLayer
from traformer.ops.ssmax import length_scale


class ScalableSoftmaxAttention(SoftmaxAttentionLayer):
    """Softmax whose sharpness grows with the logarithm of the number of keys: scalable softmax, with RoPE.

    Source: Nakanishi 2025, "Scalable-Softmax Is Superior for Attention": scores are multiplied by s_h * log n, n the
    number of keys the query sees, s_h learned. s_h starts at init_scale = 0.168, where s log n averages 1 over
    lengths up to 1024, as the paper initialises it. RoPE rides along, as in the paper's models (theta 500,000, as our
    RoPE).
    Path: the factor is put on the query, then torch's fused attention.

    Options: init_scale; position ("rope" or "none"), theta.
    """

    name = "ssmax"

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.log_scale = nn.Parameter(torch.full((self.num_heads,), float(self.option["init_scale"])))

    @classmethod
    def check_options(cls, config: Any, options: dict[str, Any]) -> None:
        super().check_options(config, options)
        check_rotary(cls.name, config.head_dim, options)

    def reset_own_parameters(self) -> None:
        from transformers import initialization as init

        super().reset_own_parameters()
        init.constant_(self.log_scale, float(self.option["init_scale"]))

    def prepare(self, context: AttentionContext, hidden_states: Tensor) -> Any:
        tables = rotary_tables(context, hidden_states, self.head_dim, self.option)
        return super().prepare(context, hidden_states), tables

    def mask(self, context: AttentionContext) -> Tensor | None:
        return context.shared[0]

    def place(self, q: Tensor, k: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor]:
        return turned(q, context.shared[1]), turned(k, context.shared[1])

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, hidden_states: Tensor, context: AttentionContext
    ) -> tuple[Tensor, Tensor | None]:
        seen = context.positions(q.shape[2], q.device) + 1  # [B or 1, T]
        q = q * length_scale(self.log_scale, seen).to(q.dtype)
        return super().attend(q, k, v, hidden_states, context)
