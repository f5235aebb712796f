"""Contextual position encoding (CoPE): positions count gates, which depend on query and key."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from traformer.ops.eager import BlockOptions, attend_in_blocks, content_scores, reverse_cumsum, softmax_over, widened


def cope_logits(q: Tensor, scores: Tensor, table: Tensor, visible: Tensor) -> Tensor:
    """q_i . e[p_ij] with p_ij the sum of sigmoid(s_il) over l = j .. i, cut off at the table's end; [B, Hq, T, Tk].

    q [B, Hq, T, D], scores [B, Hq, T, Tk], table [positions, D]; between whole positions the logits are interpolated
    linearly.
    """
    gates = torch.where(visible, scores.sigmoid(), 0.0)
    last = table.shape[0] - 1
    positions = reverse_cumsum(gates).clamp(max=last)
    lower = positions.detach().floor()
    upper = positions.detach().ceil()
    by_position = widened(q) @ widened(table).t()  # [B, Hq, T, positions]
    at_lower = by_position.gather(-1, lower.long())
    at_upper = by_position.gather(-1, upper.long())
    return torch.lerp(at_lower, at_upper, positions - lower)


def cope_attention(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, visible: Tensor, *, scale: float, **blocks: Unpack[BlockOptions]
) -> tuple[Tensor, Tensor | None]:
    """Softmax of s_ij + q_i . e[p_ij]; see `cope_logits`."""

    def weigh(q: Tensor, k: Tensor, visible: Tensor) -> Tensor:
        scores = content_scores(q, k, scale)
        return softmax_over(scores + cope_logits(q, scores, table, visible), visible)

    return attend_in_blocks(weigh, q, k, v, visible, **blocks)
