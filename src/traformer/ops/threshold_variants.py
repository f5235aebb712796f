"""TRA with a part replaced: eager, for the variants that the fused operator does not support."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor

from traformer.ops.eager import BlockOptions, attend_in_blocks, content_scores, reverse_cumsum


def threshold_variant_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    threshold: Tensor,
    *,
    log_decay: Tensor | None = None,
    key_bias: Tensor | None = None,
    removal: bool = True,
    surrogate_width: float | None = None,
    scale: float,
    **blocks: Unpack[BlockOptions],
) -> tuple[Tensor, Tensor | None]:
    """Softmax over the keys that score above the threshold (removal) or over all (no removal), with a kind of distance.

    visible          bool [B or 1, Hq or 1, T, Tk]; threshold [B or 1, Hq or 1, T]
    log_decay        [B, Hq, T]: adds log_decay_i * c_ij, c_ij = keys above it in [j .. i]: contextual distance
    key_bias         [B or 1, Hq, Tk]: adds this to key j's logit: ordinary distance (a slope times its position, or
                     minus the running sum of log forget gates; the query's own part is the same for its whole row)
    surrogate_width  a straight-through gradient for the threshold: forward keeps or removes, backward behaves as if
                     each key had been weighted by sigmoid((s - threshold) / surrogate_width)
    A row without any key gets zeros.
    """
    per_query: Sequence[Tensor] = (threshold.unsqueeze(-1),)
    if log_decay is not None:
        per_query = (*per_query, log_decay.unsqueeze(-1))

    def weigh(q: Tensor, k: Tensor, visible: Tensor, threshold: Tensor, log_decay: Tensor | None = None) -> Tensor:
        scores = content_scores(q, k, scale)
        above = visible & (scores.detach() > threshold.detach())
        logits = scores
        if log_decay is not None:
            logits = logits + log_decay * reverse_cumsum(above.to(scores.dtype))
        if key_bias is not None:
            logits = logits + key_bias[:, :, None, : k.shape[2]]
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
