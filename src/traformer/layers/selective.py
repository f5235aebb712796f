"""Selective attention (Leviathan et al.)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from traformer.layers.context import AttentionContext
from traformer.layers.eager import EagerAttentionLayer
from traformer.layers.rotary_option import check_rotary, rotary_tables, turned
from traformer.ops.selective import selection_mask, selective_attention

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from traformer.layers.options import LayerArguments


class SelectiveAttention(EagerAttentionLayer):
    """Softmax attention in which tokens mask keys for the tokens after them: selective attention, with RoPE.

    Source: Leviathan, Kalman, Matias 2025, "Selective Attention Improves Transformer": the scores of the first head,
    cut at 0, without the diagonal and the first token, summed over the earlier tokens, are taken off every head's
    logits. No parameters. Position is left to others by the method: RoPE (theta 500,000) rides along by default, our
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
    def check_options(cls, options: dict[str, Any], num_heads: int, head_dim: int) -> None:
        super().check_options(options, num_heads, head_dim)
        check_rotary(cls.name, head_dim, options)

    def prepare(self, context: AttentionContext, hidden_states: Tensor) -> Any:
        length, device = hidden_states.shape[1], hidden_states.device
        visible = context.visible(length, device)
        square = visible
        if not context.is_plain_causal(length) and context.cu_seqlens is None:
            # Rows for the tokens that the cache holds, too.
            key_length = length if context.key_length is None else context.key_length
            square = dataclasses.replace(context, query_start=0).visible(key_length, device)
        return visible, square, rotary_tables(context, hidden_states, self.head_dim, self.option)

    def visible(self, context: AttentionContext) -> Tensor:
        visible: Tensor = self.prepared(context)[0]
        return visible

    def place(self, q: Tensor, k: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor]:
        return turned(q, self.prepared(context)[2]), turned(k, self.prepared(context)[2])

    def key_state(self, q: Tensor, hidden_states: Tensor, context: AttentionContext) -> Tensor:
        """The selecting head's query, its channels dealt out to the key heads: [B, Hkv, T, ceil(D / Hkv)]."""
        query = F.pad(q[:, 0], (0, -self.head_dim % self.num_key_heads))  # [B, T, channels]
        return query.reshape(*query.shape[:2], self.num_key_heads, -1).transpose(1, 2)

    def attend(  # type: ignore[override]
        self, q: Tensor, k: Tensor, v: Tensor, hidden_states: Tensor, context: AttentionContext, state: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        selecting = state.transpose(1, 2).flatten(2)[..., : self.head_dim]  # [B, Tk, D]
        masked = selection_mask(selecting, k[:, 0], self.prepared(context)[1], self.scale)  # [B, Tk, Tk]
        if q.shape[2] < masked.shape[1]:
            rows = torch.arange(q.shape[2], device=q.device) + context.query_start
            masked = masked.index_select(1, rows)
        return selective_attention(q, k, v, masked, self.visible(context), **self.settings(context))
