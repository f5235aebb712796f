"""Ordinary softmax attention through torch's fused kernel, for the methods that need nothing else."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from traformer.layers.base import AttentionContext, AttentionLayer
from traformer.ops.alibi import with_key_bias
from traformer.ops.eager import expand_heads


class SoftmaxAttentionLayer(AttentionLayer):
    """Base of the methods that are softmax over q.k with positions written into q and k, or with none."""

    def prepare(self, context: AttentionContext, hidden_states: Tensor) -> Tensor | None:
        """The mask [B or 1, 1, T, Tk], or None where the kernel's own causal mask (or no mask at all) says the same."""
        length = hidden_states.shape[1]
        sees_all = (
            length == 1
            and context.key_padding_mask is None
            and not isinstance(context.query_start, Tensor)
            and context.key_length in (None, context.query_start + 1)
        )
        if sees_all or context.is_plain_causal(length):
            return None
        return context.visible(length, hidden_states.device)

    def mask(self, context: AttentionContext) -> Tensor | None:
        """What `prepare` made, out of context.shared."""
        return context.shared

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, hidden_states: Tensor, context: AttentionContext
    ) -> tuple[Tensor, Tensor | None]:
        return self.softmax_attention(q, k, v, context, self.scale)

    def softmax_attention(
        self, q: Tensor, k: Tensor, v: Tensor, context: AttentionContext, scale: float, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Softmax of q.k * scale, plus a bias [B or 1, H or 1, T, Tk] if there is one, over the visible keys."""
        mask = self.mask(context)
        is_causal = mask is None and q.shape[2] > 1
        k, v = expand_heads(k, self.num_heads), expand_heads(v, self.num_heads)
        if bias is not None:
            visible = context.visible(q.shape[2], q.device) if mask is None else mask
            mask, is_causal = bias.to(q.dtype).masked_fill(~visible, float("-inf")), False
        dropout_p = self.dropout_p if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal, scale=scale)
        weights = None
        if context.output_attentions:
            scores = torch.matmul(q, k.transpose(-2, -1)) * scale
            weights = softmax_weights(scores if bias is None else scores + bias, context.visible(q.shape[2], q.device))
        return out, weights

    def key_biased_attention(
        self, q: Tensor, k: Tensor, v: Tensor, context: AttentionContext, key_bias: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """As above with a bias that belongs to the key, [B or 1, Hq, Tk]: a channel of the key, not a matrix."""
        k, v = expand_heads(k, self.num_heads), expand_heads(v, self.num_heads)
        q, k, v = with_key_bias(q, k, v, key_bias, self.scale)
        out, weights = self.softmax_attention(q, k, v, context, 1.0)
        return out[..., : self.head_dim], weights


def softmax_weights(scores: Tensor, visible: Tensor) -> Tensor:
    """Softmax of scores [B, H, T, Tk] over the visible keys; a row that sees none has weight 0 everywhere."""
    weights = scores.float().masked_fill(~visible, float("-inf")).softmax(-1).masked_fill(~visible, 0.0)
    return weights.to(scores.dtype)
