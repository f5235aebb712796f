"""ALiBi: a penalty that grows linearly with distance, with a slope of its own for each head."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def alibi_slopes(heads: int) -> list[float]:
    """2^(-8/n), 2^(-16/n), ... for n heads, n a power of two; else those of the next smaller power of two, then every
    other one of the next larger."""
    nearest = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8.0 * (head + 1) / nearest) for head in range(nearest)]
    if nearest < heads:
        slopes += alibi_slopes(2 * nearest)[0::2][: heads - nearest]
    return slopes


def with_key_bias(
    q: Tensor, k: Tensor, v: Tensor, key_bias: Tensor, query_bias: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v with more channels, so that the new q.k is q.k * scale + key_bias of the key - query_bias; v gets zeros.

    key_bias [B or 1, H, Tk] and query_bias [B or 1, H, T], what the queries' own keys have, are best given in fp64. The
    softmax takes any constant of a row away, so the query's part is there for exactness alone, of gradients too.

    As channels they pass through every fused kernel, causal skipping included, and the gradient with them. Each bias is
    spread over channels, and the largest come first: between a query and a near key they cancel exactly before a kernel
    adds the small ones, however large the sums are.
    """
    last = query_bias[..., -1:].detach().round()
    last = torch.where(last.isfinite(), last, 0.0)  # NaN there must not reach the rows before it
    of_query, of_key = _parts(query_bias, last, q.dtype), _parts(key_bias, last, k.dtype)
    query_channels = torch.stack([x for part in of_query for x in (torch.ones_like(part), part)], -1)
    key_channels = torch.stack([x for part in of_key for x in (part, -torch.ones_like(part))], -1)
    batch = q.shape[0]
    return (
        torch.cat((query_channels.expand(batch, -1, -1, -1), q * scale), -1),
        torch.cat((key_channels.expand(batch, -1, -1, -1), k), -1),
        F.pad(v, (0, key_channels.shape[-1])),
    )


def _parts(x: Tensor, last: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Tensors of a type that add up to x, or to x less the whole number `last`; one of them has the gradient.

    In fp32 a whole number and the rest of at most a half. Kernels add the last two or three rows of a call in another
    order, so there the whole numbers are counted from the last query, which changes no bit of the rows before it.
    """
    if dtype == torch.float64:
        return [x]
    if dtype == torch.float32:
        whole = x.detach().round()
        return [(whole - last).to(dtype), (x - whole).to(dtype)]
    parts = [x.to(dtype)]
    rest = x.detach()
    for _ in range(2):
        rest = rest - parts[-1].detach()
        parts.append(rest.to(dtype))
    return parts
