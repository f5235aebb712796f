"""Ordinary softmax attention through torch's fused kernel, for the methods that need nothing else."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from traformer.layers.base import AttentionLayer
from traformer.layers.context import AttentionContext
from traformer.ops.alibi import with_key_bias
from traformer.ops.eager import expand_heads
from traformer.ops.sliding_window import windowed_attention


class SoftmaxAttentionLayer(AttentionLayer):
    """Base of the methods that are softmax over q.k with positions written into q and k, or with none.

    Options that all of them have, off by default:
        temperature     a learned factor exp(t_h) on each head's scores, as in TRA
        exclude_self    the query's own key is left out: True, "half" (of the heads, the first) or a list of bool
        previous_heads  heads that read the previous token alone, whatever it scores: as exclude_self
        sliding_window  w: a query sees its own key and the w - 1 before it
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        temperature: bool = False,
        exclude_self: bool | str | list[bool] = False,
        previous_heads: bool | str | list[bool] = False,
        sliding_window: int | None = None,
        **more: Any,  # LayerArguments, and the options of the method
    ) -> None:
        super().__init__(
            embed_dim,
            num_heads,
            num_kv_heads,
            temperature=temperature,
            exclude_self=exclude_self,
            previous_heads=previous_heads,
            sliding_window=sliding_window,
            **more,
        )

    def make_mask(self, context: AttentionContext, hidden_states: Tensor) -> Tensor | None:
        """The mask [B or 1, 1, T, Tk] (own key included), or None where order and window alone decide what is seen."""
        length = hidden_states.shape[1]
        start = context.query_start
        if context.key_padding_mask is None and context.cu_seqlens is None and not isinstance(start, Tensor):
            is_all = context.key_length in (None, start + length)
            if is_all and (length == 1 or start == 0 or self.window is not None):
                return None
        return context.visible(length, hidden_states.device, self.window, self.sinks)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, hidden_states: Tensor, context: AttentionContext
    ) -> tuple[Tensor, Tensor | None]:
        return self.softmax_attention(q, k, v, context, self.scale)

    def softmax_attention(
        self, q: Tensor, k: Tensor, v: Tensor, context: AttentionContext, scale: float, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Softmax of q.k * scale, plus a bias [B or 1, H or 1, T, Tk] if there is one, over the visible keys."""
        if self.window is not None and not self.sinks and bias is None and self.sees_by_order(context):
            seen = max(self.window, 2 if self.previous_heads else 1) + q.shape[2] - 1
            k, v = k[:, :, -seen:], v[:, :, -seen:]  # before a copy of what is never read
        k, v = expand_heads(k, self.num_heads), expand_heads(v, self.num_heads)
        out = self._each_kind_of_head(q, k, v, context, scale, bias)
        weights = None
        if context.output_attentions:
            scores = torch.matmul(q, k.transpose(-2, -1)) * scale
            weights = softmax_weights(scores if bias is None else scores + bias, self.visible_keys(q, context))
        return out, weights

    def sees_by_order(self, context: AttentionContext) -> bool:
        """Whether order and window alone decide what is seen, and nobody asks for the weights of every key."""
        return self.mask(context) is None and not context.output_attentions

    def _each_kind_of_head(
        self, q: Tensor, k: Tensor, v: Tensor, context: AttentionContext, scale: float, bias: Tensor | None
    ) -> Tensor:
        """Heads that read the previous token, that leave out their own key and that do not, each kind on its own."""
        excluded, previous = self.excluded_heads, self.previous_heads or [False] * self.num_heads
        if isinstance(excluded, bool):
            return self._fused(q, k, v, context, scale, bias, excluded)
        parts, order = [], []
        for kind in ((True, True), (True, False), (False, False)):
            heads = [head for head, each in enumerate(zip(excluded, previous, strict=True)) if each == kind]
            if not heads:
                continue
            index = torch.tensor(heads, device=q.device)
            some_q, some_k, some_v = (x.index_select(1, index) for x in (q, k, v))
            if kind == (True, True):
                parts.append(previous_values(some_v, q.shape[2], context))
            else:
                chosen = bias if bias is None or bias.shape[1] == 1 else bias.index_select(1, index)
                parts.append(self._fused(some_q, some_k, some_v, context, scale, chosen, kind[0]))
            order += heads
        out = torch.cat(parts, dim=1)
        if order == sorted(order):
            return out
        return out.index_select(1, torch.tensor([order.index(head) for head in range(len(order))], device=q.device))

    def _fused(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        context: AttentionContext,
        scale: float,
        bias: Tensor | None,
        exclude_self: bool,
    ) -> Tensor:
        """Heads that are all alike; k and v have as many as q."""
        length, mask = q.shape[2], self.mask(context)
        dropout_p = self.dropout_p if self.training else 0.0
        if mask is None and bias is None:
            start = k.shape[2] - length  # keys that no query of the window sees may have been left out
            if self.window is not None and (start or length > self.window):
                return windowed_attention(
                    q,
                    k,
                    v,
                    self.window,
                    scale=scale,
                    query_start=start,
                    exclude_self=exclude_self,
                    dropout_p=dropout_p,
                    sinks=self.sinks,
                )
            if not exclude_self:
                return F.scaled_dot_product_attention(q, k, v, None, dropout_p, length > 1, scale=scale)
            # A query sees the keys before it: query i + 1 against key i is the causal order again. Query 0 sees none.
            first = 0 if start else 1
            if length == first:
                return torch.zeros_like(q)
            q, k, v = q[:, :, first:], k[:, :, :-1], v[:, :, :-1]
            out = F.scaled_dot_product_attention(q, k, v, None, dropout_p, q.shape[2] > 1, scale=scale)
            return F.pad(out, (0, 0, first, 0))
        visible = context.visible(length, q.device, self.window, self.sinks) if mask is None else mask
        if exclude_self:
            visible = visible & ~context.own_keys(length, q.device)
        if bias is not None:
            visible = bias.to(q.dtype).masked_fill(~visible, float("-inf"))
        return F.scaled_dot_product_attention(q, k, v, visible, dropout_p, scale=scale)

    def key_biased_attention(
        self, q: Tensor, k: Tensor, v: Tensor, context: AttentionContext, key_bias: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """As above with a bias that belongs to the key, [B or 1, Hq, Tk]: channels of q and k, not a matrix."""
        k, v = expand_heads(k, self.num_heads), expand_heads(v, self.num_heads)
        q, k, v = with_key_bias(q, k, v, key_bias, context.of_own_keys(key_bias, q.shape[2]), self.scale)
        out, weights = self.softmax_attention(q, k, v, context, 1.0)
        return out[..., : self.head_dim], weights


def previous_values(v: Tensor, length: int, context: AttentionContext) -> Tensor:
    """The value of the last real token before each new one, [B, H, T, D]; 0 before the first of a sequence.

    v: [B, H, Tk, D], or its end where the rest is out of every window.
    """
    is_first = context.places(length, v.device) <= 0
    return context.of_previous(v, length).masked_fill(is_first[:, None, :, None], 0.0)


def softmax_weights(scores: Tensor, visible: Tensor) -> Tensor:
    """Softmax of scores [B, H, T, Tk] over the visible keys; a row that sees none has weight 0 everywhere."""
    weights = scores.float().masked_fill(~visible, float("-inf")).softmax(-1).masked_fill(~visible, 0.0)
    return weights.to(scores.dtype)
