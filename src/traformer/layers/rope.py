"""Rotary position embedding (RoPE), the usual choice and the baseline TRA is compared with."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from traformer.errors import InputError
from traformer.layers.base import AttentionContext
from traformer.layers.softmax import SoftmaxAttentionLayer
from traformer.ops.rope import apply_rope, rope_tables


class RotaryAttention(SoftmaxAttentionLayer):
    """Softmax attention on rotated queries and keys."""

    name = "rope"

    @classmethod
    def check_options(cls, config: Any, options: dict[str, Any]) -> None:
        super().check_options(config, options)
        if config.head_dim % 2:
            raise InputError(
                f"attention 'rope' turns pairs of channels and needs an even head_dim, not {config.head_dim}"
            )
        if not options["theta"] > 0:
            raise InputError(f"attention option theta must be positive, got {options['theta']}")

    def prepare(self, context: AttentionContext, hidden_states: Tensor) -> Any:
        positions = context.positions(hidden_states.shape[1], hidden_states.device)
        tables = rope_tables(positions, self.head_dim, self.option["theta"], hidden_states.dtype)
        return super().prepare(context, hidden_states), tables

    def mask(self, context: AttentionContext) -> Tensor | None:
        return context.shared[0]

    def place(self, q: Tensor, k: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor]:
        tables = context.shared[1]
        return apply_rope(q, tables).to(q.dtype), apply_rope(k, tables).to(k.dtype)
