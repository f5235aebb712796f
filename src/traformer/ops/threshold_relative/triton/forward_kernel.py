"""The forward walk: one program per block of queries goes over the key blocks from the diagonal to the left."""

from __future__ import annotations

import math

import triton
import triton.language as tl

from traformer.ops.threshold_relative.problem import Forward, Problem, empty_forward
from traformer.ops.threshold_relative.triton.configurations import UNSPECIALISED, alignment, configuration
from traformer.ops.threshold_relative.triton.launching import common_arguments, launch, strides
from traformer.ops.threshold_relative.triton.summaries import summarise
from traformer.ops.threshold_relative.triton.tiles import (
    HALF_SHIFT,
    HALF_TOP,
    INF,
    LN2,
    LOG2E,
    NO_SHIFT,
    ROOM,
    dropout_keys,
    inverse_gap,
    is_kept,
    kept_nearer,
    load_tile,
    load_values,
    look,
    may_keep,
    multiply,
    rest_is_small,
    row_decays,
    row_limits,
    row_norms,
    row_ranges,
    store_tile,
    survivors,
)


@triton.jit(do_not_specialize=UNSPECIALISED)
def forward_kernel(
    q,
    k,
    v,
    log_decay,  # [B, Hq, Tq], contiguous
    threshold,  # fp32 [B, Hq, Tq], or None: threshold_value
    exclude_self,  # bool [Hq] or None
    padding,  # bool [B, Tk] or None
    first_real,  # int32 [B], with padding: the leftmost key that is real
    first_key,  # int32 [Tq] or None
    score_bound,  # fp32 [Hq] or None
    seed,  # int64 [], with dropout
    norm,  # fp32 [B, Hkv, blocks], see summaries.py
    norm_so_far,
    value,
    value_so_far,
    out,
    normaliser,  # fp32 [B, Hq, Tq]
    reach,  # int32 [B, Hq, Tq]
    kept,  # int32 [B, Hq, Tq]
    stride_qb,
    stride_qh,
    stride_qt,
    stride_kb,
    stride_kh,
    stride_kt,
    stride_vb,
    stride_vh,
    stride_vt,
    stride_ob,
    stride_oh,
    stride_ot,
    query_heads,
    group,  # query heads per key head
    queries,
    keys,
    query_start,
    padding_stride,
    blocks,
    row_blocks,
    threshold_value,
    threshold_rest,
    scale,
    scale_rest,
    log_tolerance,  # base 2; NaN switches the exit off
    steepest,
    drop_limit,
    survivor_scale,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    ALIGN: tl.constexpr,
    NEEDS_GRAD: tl.constexpr,
    SURROGATE: tl.constexpr,
    DROPOUT: tl.constexpr,
    BY_TRIANGLE: tl.constexpr,
):
    program = tl.program_id(0)
    row_block = row_blocks - 1 - program % row_blocks  # the longest walks first
    flat_head = program // row_blocks  # batch * Hq + head
    batch = flat_head // query_heads
    head = flat_head % query_heads
    key_head = head // group
    flat_key_head = batch * (query_heads // group) + key_head
    stride_qt = stride_qt * ALIGN
    stride_kt = stride_kt * ALIGN
    stride_vt = stride_vt * ALIGN
    stride_ot = stride_ot * ALIGN
    q += batch.to(tl.int64) * stride_qb * ALIGN + head.to(tl.int64) * stride_qh * ALIGN
    k += batch.to(tl.int64) * stride_kb * ALIGN + key_head.to(tl.int64) * stride_kh * ALIGN
    v += batch.to(tl.int64) * stride_vb * ALIGN + key_head.to(tl.int64) * stride_vh * ALIGN
    out += batch.to(tl.int64) * stride_ob * ALIGN + head.to(tl.int64) * stride_oh * ALIGN
    if padding is not None:
        padding += batch.to(tl.int64) * padding_stride
    row0 = row_block * BLOCK_M
    q += row0.to(tl.int64) * stride_qt
    out += row0.to(tl.int64) * stride_ot
    index = tl.arange(0, BLOCK_M)
    q_offset = index * stride_qt
    row = row0 + index
    real = row < queries
    flat_row = flat_head.to(tl.int64) * queries + row

    # The query side, [M] each.
    q_tile = load_tile(q, index, stride_qt, real, HEAD_SIZE, BLOCK_D)
    decay, decay_bad = row_decays(log_decay, flat_row, real)
    inverse = inverse_gap(decay)
    decay = decay * LOG2E
    limit = row_limits(threshold, threshold_value, scale, flat_row, real)
    position = query_start + row
    first, last = row_ranges(row, real, head, batch, query_start, keys, exclude_self, first_key, first_real)
    row_keys = position.to(tl.uint32)
    if DROPOUT:
        row_keys = dropout_keys(seed, flat_head, position)

    end = tl.max(last, 0)
    block = tl.where(end < 0, -1, end // BLOCK_N)
    stop_block = tl.min(first, 0) // BLOCK_N
    q_norm = row_norms(q, index, stride_qt, real, q_tile, tl.minimum(queries, 0), HEAD_SIZE, BLOCK_D)
    reach_norm = q_norm * (scale * LOG2E)  # times |k|: a bound of the score, base 2
    bound = INF
    if score_bound is not None:
        bound = tl.load(score_bound + head) * LOG2E
    norm += flat_key_head.to(tl.int64) * blocks
    norm_so_far += flat_key_head.to(tl.int64) * blocks
    value += flat_key_head.to(tl.int64) * blocks
    value_so_far += flat_key_head.to(tl.int64) * blocks

    # Weights need no running maximum where their bound leaves room; fp16 ones are moved down by a constant.
    most = tl.minimum(reach_norm * tl.load(norm_so_far + tl.maximum(block, 0)), bound)  # [M]
    largest_value = tl.load(value_so_far + tl.maximum(block, 0))
    room = tl.max(most, 0) + tl.log2(end + 1.0) + tl.log2(1.0 + largest_value)
    moving = ~(room <= ROOM)
    shift = tl.zeros_like(decay)
    if v.dtype.element_ty == tl.float16:
        shift = tl.maximum(most - HALF_TOP, 0.0)
        moving = moving | ~(tl.max(shift, 0) <= HALF_SHIFT)
    shift = tl.where(moving, NO_SHIFT, shift)

    total = tl.zeros_like(decay)
    carried = tl.zeros_like(decay)  # kept keys so far
    sums = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    low = (block + 1) * BLOCK_N  # leftmost key read
    walking = (block >= stop_block).to(tl.int32)
    while walking > 0:
        _k_tile, dot, some = look(
            block, q_tile, q_norm, limit, first, last, padding, norm, value, q, q_offset, real, k, stride_kt, v,
            stride_vt, keys, threshold, threshold_value, threshold_rest, flat_row, scale, scale_rest, HEAD_SIZE,
            BLOCK_D, BLOCK_N, CHUNK,
        )  # fmt: skip
        low = block * BLOCK_N
        v_tile = load_values(block, v, stride_vt, padding, keys, value, HEAD_SIZE, BLOCK_D, BLOCK_N)
        keep = is_kept(dot, limit)
        nearer = kept_nearer(keep, BLOCK_N, BY_TRIANGLE)
        if moving:
            logit = dot * (scale * LOG2E) + (nearer * decay[:, None] + (carried * decay)[:, None])
            top = tl.maximum(shift, tl.max(tl.where(keep, logit, NO_SHIFT), 1))
            rescale = tl.exp2(shift - top)
            total = total * rescale
            sums = sums * rescale[:, None]
            shift = top
        logit = dot * (scale * LOG2E) + (nearer * decay[:, None] + (carried * decay - shift)[:, None])
        weight = tl.where(keep, tl.exp2(logit), 0.0)
        total += tl.sum(weight, 1)
        carried += tl.sum(keep.to(tl.float32), 1)
        if DROPOUT:
            weight = tl.where(survivors(row_keys, low + tl.arange(0, BLOCK_N), drop_limit), weight, 0.0)
        sums = multiply(weight.to(v_tile.dtype), v_tile, sums)

        remaining = low - first
        upper = tl.minimum(reach_norm * tl.load(norm_so_far + tl.maximum(block - 1, 0)), bound)
        done = rest_is_small(
            upper, decay, carried, remaining.to(tl.float32), tl.log2(total) + shift, inverse, log_tolerance, steepest,
            NEEDS_GRAD, SURROGATE,
        )  # fmt: skip
        unfinished = tl.max((real & (remaining > 0) & ~done).to(tl.int32), 0)
        block -= 1
        # A block of which nothing is kept is rarely alone: those that follow are passed over by their products only.
        passing = (some == 0) & (unfinished > 0) & (block >= stop_block)
        while passing:
            found = may_keep(
                block, q_norm, limit, first, last, padding, norm, q, q_offset, real, k, stride_kt, keys, HEAD_SIZE,
                BLOCK_D, BLOCK_N,
            )  # fmt: skip
            low = tl.where(found > 0, low, block * BLOCK_N)
            block = tl.where(found > 0, block, block - 1)
            passing = (found == 0) & (block >= stop_block)
        walking = unfinished * (block >= stop_block).to(tl.int32)

    empty = carried == 0
    bad = decay_bad & ~empty
    result = sums * tl.where(empty, 0.0, survivor_scale / tl.where(empty, 1.0, total))[:, None]
    result = tl.where(bad[:, None], float("nan"), result)
    log_total = tl.where(empty, INF, (tl.log2(total) + shift) * LN2)
    store_tile(out, index, stride_ot, real, result, HEAD_SIZE, BLOCK_D)
    tl.store(normaliser + flat_row, tl.where(bad, float("nan"), log_total), mask=real)
    reached = tl.maximum(low, first)
    tl.store(reach + flat_row, tl.where(reached <= last, reached, position + 1), mask=real)
    tl.store(kept + flat_row, carried.to(tl.int32), mask=real)


def forward(problem: Problem) -> Forward:
    q = problem.q
    chosen = configuration("forward", q.dtype, q.shape[3])
    result = empty_forward(problem)
    if 0 in q.shape:
        return result
    summaries = summarise(problem, chosen.keys)
    align = alignment(q, problem.k, problem.v, result.out)
    row_blocks = -(-q.shape[2] // chosen.rows)
    launch(
        forward_kernel,
        q.shape[0] * q.shape[1] * row_blocks,
        q,
        **common_arguments(problem, align),
        **summaries._asdict(),
        score_bound=problem.score_bound,
        **result._asdict(),
        **strides(align, o=result.out),
        blocks=summaries.norm.shape[2],
        row_blocks=row_blocks,
        log_tolerance=math.log2(problem.tolerance * 0.9999) if problem.tolerance > 0.0 else math.nan,
        BLOCK_M=chosen.rows,
        BLOCK_N=chosen.keys,
        NEEDS_GRAD=problem.needs_grad,
        num_warps=chosen.warps,
    )
    return result
