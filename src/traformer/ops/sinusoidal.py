"""Sinusoidal absolute positions, after Vaswani et al. 2017."""

from __future__ import annotations

import torch
from torch import Tensor


def sinusoids(position_ids: Tensor, width: int, dtype: torch.dtype, base: float = 10_000.0) -> Tensor:
    """[B, T] -> [B, T, width]: channel 2e is sin(p / base^(2e / width)), channel 2e + 1 the cosine of that angle."""
    device = position_ids.device
    wide = torch.float32 if device.type == "mps" else torch.float64
    exponents = torch.arange(0, width, 2, dtype=wide, device=device) / width
    angles = position_ids.to(wide)[..., None] * base**-exponents  # [B, T, ceil(width / 2)]
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)[..., :width].to(dtype)
