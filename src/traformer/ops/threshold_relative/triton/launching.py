"""From a problem to kernel arguments, and the launch itself. Nothing here waits for the device."""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import Any

import torch
from torch import Tensor

from traformer.ops.threshold_relative.dropout import drop_limit
from traformer.ops.threshold_relative.problem import Problem
from traformer.ops.threshold_relative.triton.configurations import COUNT_BY_TRIANGLE, block_d
from traformer.types import JsonObject


def strides(align: int, **tensors: Tensor) -> dict[str, int]:
    """stride_<name>b, h, t of [B, H, T, D] tensors in units of `align`: so the compiler knows what divides them."""
    return {f"stride_{name}{axis}": x.stride(n) // align for name, x in tensors.items() for n, axis in enumerate("bht")}


def two_floats(x: float) -> tuple[float, float]:
    """x as a sum of two fp32 numbers, which is how a kernel's arguments carry an fp64 one."""
    high = ctypes.c_float(x).value
    return high, x - high


def common_arguments(problem: Problem, align: int) -> JsonObject:
    """What the forward, backward and decode kernels all take."""
    q, padding, dropout = problem.q, problem.key_padding_mask, problem.dropout_p > 0.0
    threshold_value, threshold_rest = two_floats(problem.threshold_value)
    scale, scale_rest = two_floats(problem.scale)
    limit = drop_limit(problem.dropout_p) if dropout else 0
    return {
        "q": q,
        "k": problem.k,
        "v": problem.v,
        "log_decay": problem.log_decay.contiguous(),
        "threshold": None if problem.threshold is None else problem.threshold.contiguous(),
        "exclude_self": problem.exclude_self,
        "padding": padding,
        "first_real": None if padding is None else first_real(padding),
        "first_key": problem.first_key,
        "seed": problem.dropout_seed if dropout else None,
        **strides(align, q=q, k=problem.k, v=problem.v),
        "query_heads": q.shape[1],
        "group": problem.heads_per_key_head,
        "queries": q.shape[2],
        "keys": problem.query_start + q.shape[2],  # later ones are never read
        "query_start": problem.query_start,
        "padding_stride": 0 if padding is None else padding.stride(0),
        "threshold_value": threshold_value,
        "threshold_rest": threshold_rest,
        "scale": scale,
        "scale_rest": scale_rest,
        "steepest": 0.25001 / problem.surrogate_width if problem.surrogate_width else 0.0,
        "drop_limit": limit - (1 << 32) if limit >= 1 << 31 else limit,  # the bits of a uint32
        "survivor_scale": 1.0 / (1.0 - problem.dropout_p),
        "ALIGN": align,
        "HEAD_SIZE": q.shape[3],
        "BLOCK_D": block_d(q.shape[3]),
        "CHUNK": recheck_chunk(q),
        "SURROGATE": problem.surrogate_width > 0.0,
        "DROPOUT": dropout,
        "BY_TRIANGLE": COUNT_BY_TRIANGLE,
    }


def recheck_chunk(q: Tensor) -> int:
    """Channels that the recheck of a product sums at once: fp32 ones in order, as every backend does; sums of 16-bit
    products are exact in fp64 in any order (unless their magnitudes differ by more than 2^29)."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return block_d(q.shape[3])
    return 1 if q.dtype == torch.float32 else 8


def first_real(padding: Tensor) -> Tensor:
    """int32 [B]: the leftmost real key of each row of the batch, or Tk."""
    length = padding.shape[1]
    position = torch.arange(length, dtype=torch.int32, device=padding.device)
    return torch.where(padding, position, length).amin(-1).to(torch.int32)


def channels_together(x: Tensor) -> Tensor:
    """Any strides on batch, heads and length are accepted; only channels must be contiguous."""
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


def launch(kernel: Any, programs: int, like: Tensor, **arguments: Any) -> None:
    """Run `programs` instances on the device of `like`."""
    device = torch.cuda.device(like.device) if like.is_cuda else contextlib.nullcontext()
    with device:
        # Fusing a multiplication and an addition is the default in some versions of the compiler and not in others.
        kernel[(programs,)](**arguments, enable_fp_fusion=True)
