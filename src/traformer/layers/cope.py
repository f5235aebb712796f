"""CoPE: contextual position encoding."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor, nn

from traformer.errors import InputError
from traformer.layers.context import AttentionContext
from traformer.layers.eager import EagerAttentionLayer
from traformer.layers.options import LayerArguments
from traformer.ops.cope import cope_attention
from traformer.types import Options


class ContextualPositionAttention(EagerAttentionLayer):
    """Softmax attention whose positions count gated keys: contextual position encoding.

    Source: Golovneva et al. 2024, "Contextual Position Encoding": gate_ij = sigmoid(s_ij), p_ij = the sum of the
    gates of keys j .. i, at most npos_max - 1, logit_ij = s_ij + q_i . e[p_ij], interpolated linearly between whole
    positions. The table e (npos_max x head size) is shared by the heads, one per layer, starts at 0 (the authors'
    code), and meets the query without the factor 1/sqrt(d), as there. The gates use the scaled scores. No other
    position embedding.
    Path: eager torch, in blocks of queries that are computed again in the backward.

    Option npos_max: rows of the table, 64 in the paper's experiments on flip-flop.
    """

    name = "cope"

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        npos_max: int = 64,
        **more: Unpack[LayerArguments],
    ) -> None:
        super().__init__(embed_dim, num_heads, num_kv_heads, npos_max=npos_max, **more)

    def add_parameters(self) -> None:
        super().add_parameters()
        self.position_table = nn.Parameter(torch.zeros(self.option["npos_max"], self.head_dim))

    @classmethod
    def check_options(cls, options: Options, num_heads: int, head_dim: int) -> None:
        super().check_options(options, num_heads, head_dim)
        if not isinstance(options["npos_max"], int) or options["npos_max"] < 2:
            raise InputError(f"attention option npos_max must be a whole number from 2 on, got {options['npos_max']!r}")

    def reset_own_parameters(self) -> None:
        super().reset_own_parameters()
        nn.init.zeros_(self.position_table)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, hidden_states: Tensor, context: AttentionContext
    ) -> tuple[Tensor, Tensor | None]:
        return cope_attention(q, k, v, self.position_table, self.visible(context), **self.settings(context))
