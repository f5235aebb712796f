"""Scalable softmax: n^(s z) in place of e^z, n the number of keys."""

from __future__ import annotations

from torch import Tensor


def length_scale(scale: Tensor, seen: Tensor) -> Tensor:
    """s_h * log n: scale [H], keys seen by each query [B, T] -> factor on the scores [B, H, T, 1]."""
    return scale[:, None, None] * seen.to(scale.dtype).log()[:, None, :, None]
