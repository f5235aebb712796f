"""TRA with a part replaced: eager, for the variants that the fused operator does not support."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from traformer.ops.eager import BlockOptions, attend_in_blocks, content_scores, relative_bias, reverse_cumsum


def threshold_variant_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    threshold: Tensor,
    *,
    log_decay: Tensor | None = None,
    key_bias: Tensor | None = None,
    query_bias: Tensor | None = None,
    removal: bool = True,
    surrogate_width: float | None = None,
    scale: float,
    **blocks: Unpack[BlockOptions],
) -> tuple[Tensor, Tensor | None]:
    """Softmax over the keys that score above the threshold (removal) or over all (no removal), with a kind of distance.

    visible          bool [B or 1, Hq or 1, T, Tk]; threshold [B or 1, Hq or 1, T]
    log_decay        [B, Hq, T]: adds log_decay_i * c_ij, c_ij = keys above it in [j .. i]: contextual distance
    key_bias         [B or 1, Hq, Tk], with query_bias [B or 1, Hq, T]: adds b_j - b_i: ordinary distance (a slope times
                     the position, or minus the running sum of log forget gates)
    surrogate_width  a straight-through gradient for the threshold: forward keeps or removes, backward behaves as if
                     each key had been weighted by sigmoid((s - threshold) / surrogate_width)
    A row without any key gets zeros.
    """
    per_query = [x.unsqueeze(-1) for x in (threshold, log_decay, query_bias) if x is not None]

    def weigh(q: Tensor, k: Tensor, visible: Tensor, threshold: Tensor, decay_or_bias: Tensor | None = None) -> Tensor:
        scores = content_scores(q, k, scale)
        above = visible & (scores.detach() > threshold.detach())
        logits = scores
        if key_bias is not None and decay_or_bias is not None:
            logits = logits + relative_bias(key_bias, decay_or_bias, scores)
        elif decay_or_bias is not None:
            logits = logits + decay_or_bias * reverse_cumsum(above.to(scores.dtype))
        among = above if removal else visible
        peak = logits.detach().masked_fill(~among, float("-inf")).amax(-1, keepdim=True)
        peak = torch.where(peak.isfinite(), peak, 0.0)
        if surrogate_width is None:
            mass = (logits - peak).masked_fill(~among, float("-inf")).exp()
        else:
            soft = ((scores - threshold) / surrogate_width).sigmoid()
            kept = above.to(scores.dtype) + soft - soft.detach()
            seen = visible & above.any(-1, keepdim=True)  # a row that keeps nothing has gradient 0, as in TRA
            mass = (logits - peak).clamp(max=0.0).masked_fill(~seen, float("-inf")).exp() * kept
        total = mass.sum(-1, keepdim=True)
        return mass / torch.where(total == 0, 1.0, total)

    return attend_in_blocks(weigh, q, k, v, visible, per_query, **blocks)
