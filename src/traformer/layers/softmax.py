"""Ordinary softmax attention through torch's fused kernel, for the methods that need nothing else."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from traformer.layers.base import AttentionContext, AttentionLayer


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
        mask = self.mask(context)
        is_causal = mask is None and q.shape[2] > 1
        groups = self.num_heads // self.num_key_heads
        if groups > 1:
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        dropout_p = self.dropout_p if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal, scale=self.scale)
        weights = None
        if context.output_attentions:
            visible = context.visible(q.shape[2], q.device)
            weights = softmax_weights(torch.matmul(q, k.transpose(-2, -1)) * self.scale, visible)
        return out, weights


def softmax_weights(scores: Tensor, visible: Tensor) -> Tensor:
    """Softmax of scores [B, H, T, Tk] over the visible keys; a row that sees none has weight 0 everywhere."""
    weights = scores.float().masked_fill(~visible, float("-inf")).softmax(-1).masked_fill(~visible, 0.0)
    return weights.to(scores.dtype)
