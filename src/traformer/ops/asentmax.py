"""Adaptive scalable entmax (the query decides how its scores grow with the number of keys) and NAPE's slopes."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def nape_slopes(heads: int) -> list[float]:
    """1, 1/2, 1/3, ... for the first half of the heads (ALiBi); 0 for the others (no position)."""
    return [1.0 / (head + 1) if head < heads // 2 else 0.0 for head in range(heads)]


def adaptive_scale(beta: Tensor, gamma: Tensor, position: Tensor, delta: float, gamma_range: float) -> Tensor:
    """delta + softplus(beta) * log(i + 2)^(gamma_range * tanh(gamma)).

    beta, gamma: projections of the query's token, [B, T, H]; position i [B, T], from 0 -> factor on the scores [B, H,
    T, 1].
    """
    log_count = (position + 2).to(beta.dtype).log()[..., None]
    return (delta + F.softplus(beta) * log_count ** (gamma_range * gamma.tanh())).transpose(1, 2)[..., None]
