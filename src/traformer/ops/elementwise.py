"""Dropout and the gated product of the MLP with less to compute, to hold and to draw than torch's own.

Torch draws a random number for every element, one after the other on a CPU. Where few elements are dropped, it is the
gaps between them that are drawn here, from the geometric distribution: each element is still dropped with probability p
and independently of all others.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

# Above this, drawing the gaps is no longer cheaper than drawing for every element.
LARGEST_P = 0.1


def dropped_places(count: int, p: float) -> Tensor:
    """The sorted places among 0 .. count - 1 that are dropped, each with probability p; int64 on the CPU."""
    # Enough draws to reach the end but once in 10^15 times; then more are drawn.
    draws = int(count * p + 8.0 * math.sqrt(count * p * (1.0 - p))) + 16
    parts, reached = [], 0.0
    while reached < count:
        uniform = torch.rand(draws, dtype=torch.float64)  # in [0, 1)
        gaps = torch.log1p(-uniform).div_(math.log1p(-p)).floor_().add_(1.0)  # at least 1
        places = gaps.cumsum(0).add_(reached)
        parts.append(places)
        reached = float(places[-1])
    places = parts[0] if len(parts) == 1 else torch.cat(parts)
    return places[places <= count].long().sub_(1)


def _thin(x: Tensor, p: float) -> bool:
    """Whether gaps are drawn for this tensor: on the CPU, few dropped, and not while a graph is traced."""
    return 0.0 < p <= LARGEST_P and x.device.type == "cpu" and not torch.compiler.is_compiling()


class _ThinDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        places = dropped_places(x.numel(), p)
        ctx.save_for_backward(places)
        ctx.p = p
        out = (x * (1.0 / (1.0 - p))).contiguous()
        out.view(-1)[places] = 0.0
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        out = (grad * (1.0 / (1.0 - ctx.p))).contiguous()
        out.view(-1)[places] = 0.0
        return out, None


def dropout(x: Tensor, p: float, training: bool = True) -> Tensor:
    """F.dropout, faster on a CPU where p is small."""
    if training and _thin(x, p):
        out: Tensor = _ThinDropout.apply(x, p)  # type: ignore[no-untyped-call]
        return out
    return F.dropout(x, p, training)


class _GatedSilu(torch.autograd.Function):
    """Saves its input alone: the activation is computed again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        value, gate = x.chunk(2, dim=-1)
        out = F.silu(gate).mul_(value)
        ctx.p = p
        if p > 0.0:
            places = dropped_places(out.numel(), p)
            ctx.save_for_backward(x, places)
            out.mul_(1.0 / (1.0 - p)).view(-1)[places] = 0.0
        else:
            ctx.save_for_backward(x)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, *places = ctx.saved_tensors
        if places:
            grad = (grad * (1.0 / (1.0 - ctx.p))).contiguous()
            grad.view(-1)[places[0]] = 0.0
        value, gate = x.chunk(2, dim=-1)
        grad_x = torch.empty_like(x)
        grad_value, grad_gate = grad_x.chunk(2, dim=-1)
        torch.mul(F.silu(gate), grad, out=grad_value)
        torch.ops.aten.silu_backward.grad_input(grad * value, gate, grad_input=grad_gate)
        return grad_x, None


def gated_silu(x: Tensor, dropout_p: float = 0.0, training: bool = True) -> Tensor:
    """x [..., 2m] -> dropout(first half * silu(second half)) [..., m]."""
    p = dropout_p if training else 0.0
    fused = x.device.type == "cpu" and not torch.compiler.is_compiling() and (p == 0.0 or _thin(x, p))
    if fused and x.requires_grad and torch.is_grad_enabled():
        out: Tensor = _GatedSilu.apply(x, p)  # type: ignore[no-untyped-call]
        return out
    value, gate = x.chunk(2, dim=-1)
    return dropout(value * F.silu(gate), p, training)
