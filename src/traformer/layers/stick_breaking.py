"""Stick-breaking attention."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from traformer.errors import unknown_name
from traformer.layers.context import AttentionContext
from traformer.layers.eager import EagerAttentionLayer
from traformer.layers.options import LayerArguments
from traformer.ops.stick_breaking import stick_breaking_attention
from traformer.types import Options

REMAINDERS = ("none", "self")


class StickBreakingAttention(EagerAttentionLayer):
    """Stick-breaking instead of softmax: the nearest keys choose their share first, so recency needs no position.

    Source: Tan et al. 2025, "Scaling Stick-Breaking Attention": b_ij = sigmoid(s_ij), a_ij = b_ij times the product
    of (1 - b_il) over the keys l strictly between j and i; a query does not see its own key, so the first token gets
    zeros. No parameters, no other position embedding. The head bias and group norm of the authors' released models
    are not part of the formula and left out.
    Path: eager torch in blocks of queries; products are sums of logs, as in the authors' kernel.

    Option remainder: "self" gives what is left of the stick to the token's own value (their kernel's tests); "none"
    drops it.
    """

    name = "stick_breaking"

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        remainder: str = "none",
        temperature: bool = False,
        sliding_window: int | None = None,
        **more: Unpack[LayerArguments],
    ) -> None:
        super().__init__(
            embed_dim,
            num_heads,
            num_kv_heads,
            remainder=remainder,
            temperature=temperature,
            sliding_window=sliding_window,
            **more,
        )

    @classmethod
    def check_options(cls, options: Options, num_heads: int, head_dim: int) -> None:
        super().check_options(options, num_heads, head_dim)
        if options["remainder"] not in REMAINDERS:
            raise unknown_name("attention option remainder", options["remainder"], REMAINDERS)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, hidden_states: Tensor, context: AttentionContext
    ) -> tuple[Tensor, Tensor | None]:
        to_self = self.option["remainder"] == "self"
        return stick_breaking_attention(
            q, k, v, self.visible(context), remainder_to_self=to_self, **self.settings(context)
        )
