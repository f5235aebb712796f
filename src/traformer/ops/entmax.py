"""1.5-entmax, a sparse softmax, and attention with it."""

from __future__ import annotations

import math
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from traformer.ops.eager import BlockOptions, attend_in_blocks, content_scores, relative_bias


class _Entmax15(torch.autograd.Function):
    """p_j = max(z_j / 2 - tau, 0)^2 with tau such that the row sums to 1; -inf never gets weight."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        peak = logits.amax(-1, keepdim=True)
        z = (logits - torch.where(peak.isfinite(), peak, 0.0)) / 2.0
        # f(tau) = sum of max(z - tau, 0)^2 - 1 is convex and falls, with its root in [-1, -1/sqrt(n)] as max z = 0.
        # Newton's steps from -1 approach the root from below: at worst they halve the way until near sqrt(1/n), then
        # converge quadratically.
        steps = 6 + math.ceil(math.log2(max(logits.shape[-1], 2)) / 2) + (2 if logits.dtype == torch.float64 else 0)
        tau = torch.full_like(peak, -1.0)
        for _ in range(steps):
            above = (z - tau).clamp_(min=0.0)
            slope = 2.0 * above.sum(-1, keepdim=True)
            tau = tau + (above.square().sum(-1, keepdim=True) - 1.0) / slope.clamp(min=1e-30)
        weights = (z - tau).clamp_(min=0.0).square_()
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (weights,) = ctx.saved_tensors
        root = weights.sqrt()
        mean = (grad * root).sum(-1, keepdim=True) / root.sum(-1, keepdim=True).clamp(min=1e-30)
        result: Tensor = root * (grad - mean)
        return result


def entmax15(logits: Tensor) -> Tensor:
    """1.5-entmax along the last axis (Peters, Niculae, Martins 2019); a row of -inf alone gets zeros."""
    weights: Tensor = _Entmax15.apply(logits)  # type: ignore[no-untyped-call]
    return weights


def entmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_bias: Tensor,
    query_bias: Tensor,
    visible: Tensor,
    *,
    scale: float,
    **blocks: Unpack[BlockOptions],
) -> tuple[Tensor, Tensor | None]:
    """1.5-entmax of q.k * scale + key_bias [B or 1, Hq, Tk] - query_bias [B or 1, Hq, T] over the visible keys."""

    def weigh(q: Tensor, k: Tensor, visible: Tensor, query_bias: Tensor) -> Tensor:
        scores = content_scores(q, k, scale)
        logits = scores + relative_bias(key_bias, query_bias, scores)
        return entmax15(logits.masked_fill(~visible, float("-inf")))

    return attend_in_blocks(weigh, q, k, v, visible, (query_bias.unsqueeze(-1),), **blocks)
