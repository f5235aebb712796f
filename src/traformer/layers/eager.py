"""Base of the methods that have no fused kernel: they get the mask of visible keys, made once for all layers."""

from __future__ import annotations

from torch import Tensor

from traformer.layers.base import AttentionLayer
from traformer.layers.context import AttentionContext
from traformer.ops.eager import BlockOptions


class EagerSettings(BlockOptions):
    """Keyword arguments that every eager op takes."""

    scale: float


class EagerAttentionLayer(AttentionLayer):
    """`visible` is the mask of visible keys; `settings` are the keywords that every eager op takes."""

    def make_mask(self, context: AttentionContext, hidden_states: Tensor) -> Tensor:
        return context.visible(hidden_states.shape[1], hidden_states.device, self.window)

    def visible(self, context: AttentionContext) -> Tensor:
        """bool [B or 1, 1, T, Tk]."""
        mask = self.mask(context)
        assert mask is not None
        return mask

    def settings(self, context: AttentionContext) -> EagerSettings:
        return {
            "scale": self.scale,
            "dropout_p": self.dropout_p if self.training else 0.0,
            "query_start": context.query_start,
            "need_weights": context.output_attentions,
        }
