"""T5's relative position bias: one learned number for each head and bucket of distances."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def t5_buckets(distance: Tensor, buckets: int, max_distance: int) -> Tensor:
    """Bucket of each distance i - j >= 0 (less counts as 0).

    Half of the buckets are for 0, 1, 2, ..., then come logarithmic ones up to max_distance; the last is for all beyond.
    """
    distance = distance.clamp(min=0)
    exact = buckets // 2
    wide = distance.clamp(min=exact).double() / exact
    logarithmic = exact + (wide.log() / math.log(max_distance / exact) * (buckets - exact)).long()
    return torch.where(distance < exact, distance, logarithmic.clamp(max=buckets - 1))
