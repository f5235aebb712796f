"""Base of the methods that have no fused kernel: they get the mask of visible keys, made once for all layers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from traformer.layers.base import AttentionLayer
from traformer.layers.context import AttentionContext


class EagerAttentionLayer(AttentionLayer):
    """`prepare` makes the mask; `visible` gives it; `settings` are the keywords every eager op takes."""

    def prepare(self, context: AttentionContext, hidden_states: Tensor) -> Any:
        return context.visible(hidden_states.shape[1], hidden_states.device, self.window)

    def visible(self, context: AttentionContext) -> Tensor:
        """bool [B or 1, 1, T, Tk]."""
        visible: Tensor = self.prepared(context)
        return visible

    def settings(self, context: AttentionContext) -> dict[str, Any]:
        return {
            "scale": self.scale,
            "dropout_p": self.dropout_p if self.training else 0.0,
            "query_start": context.query_start,
            "need_weights": context.output_attentions,
        }
