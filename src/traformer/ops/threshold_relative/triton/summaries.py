"""One pass over the keys and values before a walk: the largest norm of each key block, and the largest value.

The norms bound the scores still unread (early exit) and the rounding of a product (recheck); a value that is not finite
sends its block through the careful path. Reading the inputs once costs far less than looking at every tile.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from traformer.ops.threshold_relative.problem import Problem
from traformer.ops.threshold_relative.triton.configurations import UNSPECIALISED, alignment, block_d
from traformer.ops.threshold_relative.triton.launching import launch, strides
from traformer.ops.threshold_relative.triton.tiles import INF, NORM_FLOOR, is_finite, load_tile, norms_above


class Summaries(NamedTuple):
    """All fp32 [B, Hkv, blocks]. Padded keys do not count."""

    norm: Tensor  # the largest finite key norm of a block; negative where some key is not finite
    norm_so_far: Tensor  # of this block and all blocks left of it, inf from a non-finite key on
    value: Tensor  # the largest magnitude among a block's values, inf where one is not finite
    value_so_far: Tensor


@triton.jit(do_not_specialize=UNSPECIALISED)
def summary_kernel(
    k,
    v,
    padding,  # bool [B, Tk] or None
    norms,  # out [B, Hkv, blocks]
    values,  # out [B, Hkv, blocks]
    stride_kb,
    stride_kh,
    stride_kt,
    stride_vb,
    stride_vh,
    stride_vt,
    keys,  # keys that some query may see
    padding_stride,
    key_heads,
    blocks,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ALIGN: tl.constexpr,
):
    program = tl.program_id(0)
    block = program % blocks
    head = (program // blocks) % key_heads
    batch = (program // blocks // key_heads).to(tl.int64)
    key = block * BLOCK_N + tl.arange(0, BLOCK_N)
    valid = key < keys
    if padding is not None:
        valid = valid & (tl.load(padding + batch * padding_stride + key, mask=valid, other=0) != 0)
    stride_kt = stride_kt * ALIGN
    stride_vt = stride_vt * ALIGN
    k_base = k + batch * stride_kb * ALIGN + head.to(tl.int64) * stride_kh * ALIGN
    v_base = v + batch * stride_vb * ALIGN + head.to(tl.int64) * stride_vh * ALIGN
    k_base += (block * BLOCK_N).to(tl.int64) * stride_kt
    v_base += (block * BLOCK_N).to(tl.int64) * stride_vt
    index = tl.arange(0, BLOCK_N)
    k_tile = load_tile(k_base, index, stride_kt, valid, HEAD_SIZE, BLOCK_D)
    v_tile = load_tile(v_base, index, stride_vt, valid, HEAD_SIZE, BLOCK_D)
    norm = norms_above(k_tile)
    all_finite = tl.max(norm, 0) < INF
    norm = tl.max(tl.where(norm < INF, norm, 0.0), 0)
    norm = tl.where(all_finite, norm, -tl.maximum(norm, NORM_FLOOR))
    # Comparisons, not maxima of the values: a maximum may drop a NaN.
    value = tl.max(tl.max(tl.where(is_finite(v_tile), tl.abs(v_tile.to(tl.float32)), INF), 1), 0)
    tl.store(norms + program, norm)
    tl.store(values + program, value)


def summarise(problem: Problem, block_n: int) -> Summaries:
    batch, key_heads, _, head_size = problem.k.shape
    keys = problem.query_start + problem.q.shape[2]  # later keys are never read
    blocks = -(-keys // block_n)
    norm = torch.empty(batch, key_heads, blocks, dtype=torch.float32, device=problem.q.device)
    value = torch.empty_like(norm)
    padding = problem.key_padding_mask
    align = alignment(problem.k, problem.v)
    launch(
        summary_kernel,
        batch * key_heads * blocks,
        problem.q,
        k=problem.k,
        v=problem.v,
        padding=padding,
        norms=norm,
        values=value,
        **strides(align, k=problem.k, v=problem.v),
        keys=keys,
        padding_stride=0 if padding is None else padding.stride(0),
        key_heads=key_heads,
        blocks=blocks,
        HEAD_SIZE=head_size,
        BLOCK_D=block_d(head_size),
        BLOCK_N=block_n,
        ALIGN=align,
        num_warps=4,
    )
    bound = torch.where(norm < 0.0, torch.inf, norm)
    return Summaries(norm, bound.cummax(-1).values, value, value.cummax(-1).values)
