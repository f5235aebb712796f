"""Contextual position encoding (CoPE): positions count gates, which depend on query and key."""

from __future__ import annotations

import torch
from torch import Tensor

from traformer.ops.eager import content_scores, in_query_blocks, mix_values, reverse_cumsum, softmax_over, widened


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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    visible: Tensor,
    *,
    scale: float,
    dropout_p: float = 0.0,
    query_start: int | Tensor = 0,
    need_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Softmax of s_ij + q_i . e[p_ij]; see `cope_logits`."""

    def rows(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
        scores = content_scores(q, k, scale)
        weights = softmax_over(scores + cope_logits(q, scores, table, visible), visible)
        return mix_values(weights, v, dropout_p), weights

    return in_query_blocks(rows, q, k, v, visible, query_start=query_start, need_weights=need_weights)
