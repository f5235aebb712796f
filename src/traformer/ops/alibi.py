"""ALiBi: a penalty that grows linearly with distance, with a slope of its own for each head."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def alibi_slopes(heads: int) -> list[float]:
    """2^(-8/n), 2^(-16/n), ... for n heads, n a power of two; else those of the next smaller power of two, then every
    other one of the next larger."""
    nearest = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8.0 * (head + 1) / nearest) for head in range(nearest)]
    if nearest < heads:
        slopes += alibi_slopes(2 * nearest)[0::2][: heads - nearest]
    return slopes


def with_key_bias(q: Tensor, k: Tensor, v: Tensor, key_bias: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v with more channels, so that the new q.k is the old q.k * scale + key_bias [B or 1, H, Tk]; v gets zeros.

    A bias of the form a_i + b_j needs only b_j under the softmax, which takes any constant of a row away. As a
    channel of the key it passes through every fused kernel, causal skipping included, and its gradient with it. In
    half precision the bias is spread over three channels, each the rounding error of those before it: nothing of its
    fp32 value is lost.
    """
    batch, heads, key_count, _ = k.shape
    bias = key_bias.expand(batch, heads, key_count).unsqueeze(-1)
    parts = [bias.to(k.dtype)]
    if k.dtype in (torch.bfloat16, torch.float16):
        for _ in range(2):
            parts.append((bias - torch.stack(parts).to(bias.dtype).sum(0)).to(k.dtype))
    ones = q.new_ones(1).expand(batch, heads, q.shape[2], len(parts))
    zeros = v.new_zeros(1).expand(batch, heads, key_count, len(parts))
    return torch.cat((q * scale, ones), -1), torch.cat((k, *parts), -1), torch.cat((v, zeros), -1)
