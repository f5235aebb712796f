"""Stick-breaking attention: each key, from the nearest on, takes a share of what the nearer ones have left."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from traformer.ops.eager import content_scores, in_query_blocks, mix_values, reverse_cumsum


def stick_breaking_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    *,
    scale: float,
    dropout_p: float = 0.0,
    query_start: int | Tensor = 0,
    need_weights: bool = False,
    remainder_to_self: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """a_ij = sigmoid(s_ij) * product over l in (j, i) of (1 - sigmoid(s_il)) for j < i; a row sums to at most 1.

    visible: as everywhere, own key included; it gets weight only with remainder_to_self, namely what the others leave.
    """
    places = (torch.arange(q.shape[2], device=q.device) + query_start)[None, None, :, None]

    def rows(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        own = torch.arange(k.shape[2], device=k.device) == places  # [1, 1, T, Tk]
        own, visible = visible & own, visible & ~own
        scores = content_scores(q, k, scale)
        left_over = torch.where(visible, F.logsigmoid(-scores), 0.0)  # log of what each key leaves
        # What lies strictly between j and i: the sum from j on, without j itself.
        logits = F.logsigmoid(scores) + reverse_cumsum(left_over) - left_over
        weights = torch.where(visible, logits.exp(), 0.0)
        if remainder_to_self:
            weights = weights + own * (1.0 - weights.sum(-1, keepdim=True))
        return mix_values(weights, v, dropout_p), weights

    return in_query_blocks(rows, q, k, v, visible, (places,), query_start=query_start, need_weights=need_weights)
