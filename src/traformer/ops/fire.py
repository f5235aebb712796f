"""FIRE: a learned function of the log distance relative to the log of the query's position."""

from __future__ import annotations

from torch import Tensor

_TINY = 1e-6


def fire_inputs(distance: Tensor, position: Tensor, slope: Tensor, threshold: Tensor) -> Tensor:
    """log(|c| d + 1) / log(|c| max(i, L) + 1) for distances d [B, T, Tk] and query positions i [B, T]; [B, T, Tk]."""
    slope = slope.abs()
    farthest = position.to(slope.dtype).maximum(threshold.abs())
    return (slope * distance.clamp(min=0) + 1.0).log() / ((slope * farthest + 1.0).log() + _TINY)[..., None]
