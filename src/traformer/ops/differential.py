"""The factor of differential attention: how much of the second attention is taken off the first."""

from __future__ import annotations

import math

from torch import Tensor


def start_of_factor(layer_idx: int) -> float:
    """lambda_init of a layer, counted from 0."""
    return 0.8 - 0.6 * math.exp(-0.3 * layer_idx)


def difference_factor(vectors: Tensor, start: float) -> Tensor:
    """lambda = exp(a1 . b1) - exp(a2 . b2) + start, 0-dim; vectors [4, d] are a1, b1, a2, b2."""
    a1, b1, a2, b2 = vectors.float().unbind(0) if vectors.dtype.itemsize < 4 else vectors.unbind(0)
    return (a1 * b1).sum().exp() - (a2 * b2).sum().exp() + start
