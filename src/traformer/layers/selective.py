"""Selective attention (Leviathan et al.)."""

from __future__ import annotations

import dataclasses
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from traformer.layers.context import AttentionContext, Prepared
from traformer.layers.eager import EagerAttentionLayer
from traformer.layers.options import LayerArguments
from traformer.layers.rotary_option import check_rotary, rotary_tables, turned
from traformer.ops.selective import selection_mask, selective_attention
from traformer.types import Options


class SelectiveAttention(EagerAttentionLayer):
    """Softmax attention in which tokens mask keys for the tokens after them: selective attention, with RoPE.

    Source: Leviathan, Kalman, Matias 2025, "Selective Attention Improves Transformer": the scores of the first head,
    cut at 0, without the diagonal and the first token, summed over the earlier tokens, are taken off every head's
    logits. No parameters. The method itself has no position: RoPE (theta 500,000) gives it by default, our
    choice. In packed or left-padded input "the first token" is the first of its own sequence. Caching: past queries
    of the selecting head are cached beside the keys and the mask is summed again at each step, so decoding costs
    O(T^2) per token; it stays exact when a cache is cut or reordered.
    Path: eager torch in blocks of queries (the mask needs a gradient).

    Options: position ("rope" or "none"), theta.
    """

    name = "selective"

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        position: str = "rope",
        theta: float = 500_000.0,
        **more: Unpack[LayerArguments],
    ) -> None:
        super().__init__(embed_dim, num_heads, num_kv_heads, position=position, theta=theta, **more)

    @classmethod
    def check_options(cls, options: Options, num_heads: int, head_dim: int) -> None:
        super().check_options(options, num_heads, head_dim)
        check_rotary(cls.name, head_dim, options)

    def prepare(self, context: AttentionContext, hidden_states: Tensor) -> Prepared:
        """The tables are what every cached and new token sees [B or 1, 1, Tk, Tk], then those of RoPE."""
        length = hidden_states.shape[1]
        square = mask = self.make_mask(context, hidden_states)
        if not context.is_plain_causal(length) and context.cu_seqlens is None:
            # Rows for the tokens that the cache holds, too.
            key_length = length if context.key_length is None else context.key_length
            square = dataclasses.replace(context, query_start=0).visible(key_length, hidden_states.device)
        return Prepared(mask, (square, *rotary_tables(context, hidden_states, self.head_dim, self.option)))

    def place(self, q: Tensor, k: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor]:
        _, *rotary = self.tables(context)
        return turned(q, tuple(rotary)), turned(k, tuple(rotary))

    def key_state(self, q: Tensor, hidden_states: Tensor, context: AttentionContext) -> Tensor:
        """The selecting head's query, its channels dealt out to the key heads: [B, Hkv, T, ceil(D / Hkv)]."""
        query = F.pad(q[:, 0], (0, -self.head_dim % self.num_key_heads))  # [B, T, channels]
        return query.reshape(*query.shape[:2], self.num_key_heads, -1).transpose(1, 2)

    def attend(  # type: ignore[override]
        self, q: Tensor, k: Tensor, v: Tensor, hidden_states: Tensor, context: AttentionContext, state: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        selecting = state.transpose(1, 2).flatten(2)[..., : self.head_dim]  # [B, Tk, D]
        masked = selection_mask(selecting, k[:, 0], self.tables(context)[0], self.scale)  # [B, Tk, Tk]
        if q.shape[2] < masked.shape[1]:
            rows = torch.arange(q.shape[2], device=q.device) + context.query_start
            masked = masked.index_select(1, rows)
        return selective_attention(q, k, v, masked, self.visible(context), **self.settings(context))
