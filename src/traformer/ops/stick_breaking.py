"""Stick-breaking attention: each key, from the nearest on, takes a share of what the nearer ones have left."""

from __future__ import annotations

from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from traformer.ops.eager import BlockOptions, attend_in_blocks, content_scores, reverse_cumsum


def stick_breaking_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    *,
    scale: float,
    remainder_to_self: bool = False,
    **blocks: Unpack[BlockOptions],
) -> tuple[Tensor, Tensor | None]:
    """a_ij = sigmoid(s_ij) * product over l in (j, i) of (1 - sigmoid(s_il)) for j < i; a row sums to at most 1.

    visible: as everywhere, own key included; it gets weight only with remainder_to_self, namely what the others leave.
    """
    places = (torch.arange(q.shape[2], device=q.device) + blocks.get("query_start", 0))[None, None, :, None]

    def weigh(q: Tensor, k: Tensor, visible: Tensor, places: Tensor) -> Tensor:
        own = torch.arange(k.shape[2], device=k.device) == places  # [1, 1, T, Tk]
        own, visible = visible & own, visible & ~own
        scores = content_scores(q, k, scale)
        left_over = torch.where(visible, F.logsigmoid(-scores), 0.0)  # log of what each key leaves
        # What lies strictly between j and i: the sum from j on, without j itself.
        logits = F.logsigmoid(scores) + reverse_cumsum(left_over) - left_over
        weights = torch.where(visible, logits.exp(), 0.0)
        if remainder_to_self:
            weights = weights + own * (1.0 - weights.sum(-1, keepdim=True))
        return weights

    return attend_in_blocks(weigh, q, k, v, visible, (places,), **blocks)
