"""The keep decision, made the same way everywhere.

`score > threshold` is a hard choice: two ways of summing one dot product may fall on different sides of it, and then
the distance of every farther key shifts. So a score within rounding of the threshold is decided by one canonical sum:
fp64, channel by channel in order, from the stored inputs (fp32 products are exact there, so fused or not gives the same
bits).
"""

from __future__ import annotations

import torch
from torch import Tensor

# Keeps the band above the absolute error of products that underflow.
_UNDERFLOW = 2.0**-100


def decide(
    scores: Tensor,  # [..., R, C] in the compute dtype, scale applied
    q: Tensor,  # [..., R, D]
    k: Tensor,  # [..., C, D]
    scale: float,
    threshold: Tensor | float,  # [..., R] or a float
    visible: Tensor,  # bool, broadcasts to scores
) -> Tensor:
    """True where a visible key is kept. Non-finite scores are the caller's to treat."""
    limit = threshold.unsqueeze(-1) if isinstance(threshold, Tensor) else threshold
    keep = scores > limit
    if scores.dtype == torch.float64:
        return keep & visible
    norms = q.float().norm(dim=-1).unsqueeze(-1) * k.float().norm(dim=-1).unsqueeze(-2)  # [..., R, C]
    band = (norms + _UNDERFLOW).mul_(q.shape[-1] * 2.0**-22 * abs(scale))
    near = (scores - limit).abs_() <= band
    near &= visible
    pairs = near.nonzero(as_tuple=True)
    if pairs[0].numel():
        lead = pairs[:-2]
        rows, columns = q[(*lead, pairs[-2])].double(), k[(*lead, pairs[-1])].double()  # [N, D]
        exact = torch.zeros_like(rows[:, 0])
        for channel in range(q.shape[-1]):
            exact = exact + rows[:, channel] * columns[:, channel]
        if isinstance(threshold, Tensor):
            keep[pairs] = exact * scale > threshold[pairs[:-1]].double()
        else:
            keep[pairs] = exact * scale > threshold
    return keep & visible
