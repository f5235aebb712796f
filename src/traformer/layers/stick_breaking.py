"""Stick-breaking attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from traformer.errors import unknown_name
from traformer.layers.base import AttentionContext
from traformer.layers.eager import EagerAttentionLayer
from traformer.ops.eager import expand_heads
from traformer.ops.stick_breaking import stick_breaking_attention

REMAINDERS = ("none", "self")


class StickBreakingAttention(EagerAttentionLayer):
    """Stick-breaking instead of softmax: the nearest keys choose their share first, so recency needs no position.

    Source: Tan et al. 2025, "Scaling Stick-Breaking Attention": b_ij = sigmoid(s_ij), a_ij = b_ij times the product of (1 - b_il) over the
    keys l strictly between j and i; a query does not see its own key, so the first token gets zeros. No parameters, no other
    position embedding. The head bias and group norm of the authors' released models are not part of the formula and left out.
    Path: eager torch in blocks of queries; products are sums of logs, as in the authors' kernel.

    Option remainder: "self" gives what is left of the stick to the token's own value (their kernel's tests); "none" drops it.
    """

    name = "stick_breaking"
    options = {"remainder": "none"}  # noqa: RUF012

    @classmethod
    def check_options(cls, config: Any, options: dict[str, Any]) -> None:
        if options["remainder"] not in REMAINDERS:
            raise unknown_name("attention option remainder", options["remainder"], REMAINDERS)

    def prepare(self, context: AttentionContext, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Keys before the token, and (for the remainder) the token's own."""
        length, device = hidden_states.shape[1], hidden_states.device
        visible = context.visible(length, device)
        places = torch.arange(length, device=device) + context.query_start
        own = torch.arange(visible.shape[-1], device=device)[None, :] == places[:, None]
        return visible & ~own, visible & own

    def visible(self, context: AttentionContext) -> Tensor:
        return context.shared[0]

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, hidden_states: Tensor, context: AttentionContext
    ) -> tuple[Tensor, Tensor | None]:
        settings = self.settings(context)
        if self.option["remainder"] == "none":
            return stick_breaking_attention(q, k, v, self.visible(context), **settings)
        # A column of ones among the values sums the weights that survive; the remainder is taken before dropout.
        settings["dropout_p"] = 0.0
        ones = torch.ones_like(v[..., :1])
        out, weights = stick_breaking_attention(q, k, torch.cat((v, ones), -1), self.visible(context), **settings)
        remainder = 1.0 - out[..., -1:]
        out = torch.nn.functional.dropout(out[..., :-1], self.dropout_p, self.training)
        own = context.shared[1].to(v.dtype)  # [B or 1, 1, T, Tk], one 1 a row
        out = out + remainder * (own @ expand_heads(v, self.num_heads))
        if weights is not None:
            weights = weights + own.to(weights.dtype) * remainder.to(weights.dtype)
        return out, weights
