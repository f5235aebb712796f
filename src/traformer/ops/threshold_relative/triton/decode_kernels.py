"""Decode: few queries against a long cache, whose keys are split among programs.

All queries of one key head share a tile, so that every key is read once. The nearest keys are read first, by one
program per key head: heads that decay are settled by them, and the programs of the other splits then return at once,
without the host knowing. A split counts its kept keys from its own right edge; since 2^(decay * count) factors, the
parts join exactly. With a key index, blocks in which no query can keep a key are passed over unread.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from traformer.errors import InputError
from traformer.ops.threshold_relative.key_index import BLOCK
from traformer.ops.threshold_relative.problem import Forward, Problem, empty_forward
from traformer.ops.threshold_relative.triton.configurations import UNSPECIALISED, alignment, block_d, configuration
from traformer.ops.threshold_relative.triton.launching import common_arguments, launch, strides
from traformer.ops.threshold_relative.triton.summaries import summarise
from traformer.ops.threshold_relative.triton.tiles import (
    BAND,
    FINITE,
    INF,
    LN2,
    LOG2E,
    NO_SHIFT,
    decide,
    dropout_keys,
    inverse_gap,
    is_finite,
    is_kept,
    kept_nearer,
    load_tile,
    multiply,
    norms_above,
    products,
    rest_is_small,
    row_decays,
    row_limits,
    row_ranges,
    survivors,
    visible_keys,
    without_non_finite,
)

MOST_QUERIES = 8  # per call and head
MOST_ROWS = 64  # queries times query heads per key head
NEAR_KEYS = 512
SPLIT_KEYS = 512  # least length of a split
MOST_SPLITS = 64


@triton.jit(do_not_specialize=UNSPECIALISED)
def decode_kernel(
    q,
    k,
    v,
    log_decay,
    threshold,
    exclude_self,
    padding,
    first_real,
    first_key,
    score_bound,
    seed,
    largest_norm,  # fp32 [B * Hkv] or None: a bound of all key norms
    index_low,  # fp32 [B, Hkv, index_blocks, D] or None: see key_index.py
    index_high,
    index_norm,  # fp32 [B, Hkv, 1 + index_blocks]
    part_sums,  # out, fp32 [B * Hkv, 1 + splits, M, D]
    part_rows,  # out, fp32 [3, B * Hkv, 1 + splits, M]: totals, shifts, counts
    part_low,  # out, int32 [B * Hkv, 1 + splits]: the leftmost key read
    settled,  # int32 [B * Hkv]: whether the nearest keys were enough; written by split 0, read by the others
    stride_qb,
    stride_qh,
    stride_qt,
    stride_kb,
    stride_kh,
    stride_kt,
    stride_vb,
    stride_vh,
    stride_vt,
    query_heads,
    group,
    queries,
    keys,
    query_start,
    padding_stride,
    index_blocks,
    key_heads,
    all_parts,  # 1 + splits
    split_blocks,
    near_keys,
    threshold_value,
    threshold_rest,
    scale,
    scale_rest,
    log_tolerance,
    steepest,
    drop_limit,
    INDEX_BLOCK: tl.constexpr,
    NEAR: tl.constexpr,  # split 0, or all the others
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    ALIGN: tl.constexpr,
    DROPOUT: tl.constexpr,
    BY_TRIANGLE: tl.constexpr,
):
    program = tl.program_id(0)
    if NEAR:
        flat_key_head = program
        part = program * 0
    else:
        flat_key_head = program // (all_parts - 1)
        part = 1 + program % (all_parts - 1)
    batch = flat_key_head // key_heads
    key_head = flat_key_head % key_heads
    wide_batch = batch.to(tl.int64)
    stride_qt = stride_qt * ALIGN
    stride_qh = stride_qh * ALIGN
    stride_kt = stride_kt * ALIGN
    stride_vt = stride_vt * ALIGN
    q += wide_batch * stride_qb * ALIGN + (key_head * group).to(tl.int64) * stride_qh
    k += wide_batch * stride_kb * ALIGN + key_head.to(tl.int64) * stride_kh * ALIGN
    v += wide_batch * stride_vb * ALIGN + key_head.to(tl.int64) * stride_vh * ALIGN
    if padding is not None:
        padding += wide_batch * padding_stride

    # Row r is query r // group of head r % group; q is read as [rows, D] by pointers of its own.
    index = tl.arange(0, BLOCK_M)
    query = index // group
    member = index % group
    real = index < queries * group
    head = tl.where(real, key_head * group + member, 0)
    flat_row = (batch * query_heads + head).to(tl.int64) * queries + query
    channel = tl.arange(0, BLOCK_D)
    inside = real[:, None] & (channel < HEAD_SIZE)[None, :]
    q_offset = member * stride_qh + query * stride_qt  # [M]
    q_tile = tl.load(q + q_offset[:, None] + channel[None, :], mask=inside, other=0.0)
    q_norm = norms_above(q_tile)
    decay, _decay_bad = row_decays(log_decay, flat_row, real)
    inverse = inverse_gap(decay)
    decay = decay * LOG2E
    limit = row_limits(threshold, threshold_value, scale, flat_row, real)
    position = query_start + query
    first, last = row_ranges(query, real, head, batch, query_start, keys, exclude_self, first_key, first_real)
    row_keys = position.to(tl.uint32)
    if DROPOUT:
        row_keys = dropout_keys(seed, batch * query_heads + head, position)
    upper = tl.zeros_like(decay) + INF
    if largest_norm is not None:
        upper = q_norm * (scale * LOG2E) * tl.load(largest_norm + flat_key_head)
    if score_bound is not None:
        upper = tl.minimum(upper, tl.load(score_bound + head, mask=real, other=0.0) * LOG2E)

    # The keys of this part: [stop_block .. block] in blocks, from the right.
    last_block = (keys - 1) // BLOCK_N
    near_blocks = near_keys // BLOCK_N
    row_parts = part_rows + (flat_key_head * all_parts + part).to(tl.int64) * BLOCK_M
    if NEAR:
        plane = tl.num_programs(0).to(tl.int64) * all_parts * BLOCK_M  # rows of all parts of all key heads
        block = last_block
        stop_block = tl.maximum(last_block - near_blocks + 1, 0)
        before = tl.zeros_like(decay)
        known = tl.zeros_like(decay)
        walking = 1
    else:
        plane = (tl.num_programs(0) // (all_parts - 1)).to(tl.int64) * all_parts * BLOCK_M
        block = last_block - near_blocks - (part - 1) * split_blocks
        stop_block = tl.maximum(block - split_blocks + 1, 0)
        near_row = part_rows + (flat_key_head * all_parts).to(tl.int64) * BLOCK_M + index
        known = tl.log2(tl.load(near_row)) + tl.load(near_row + plane)
        before = tl.load(near_row + 2 * plane)
        walking = 1 - tl.load(settled + flat_key_head)
    walking = walking * (block >= stop_block).to(tl.int32)

    total = tl.zeros_like(decay)
    shift = tl.zeros_like(decay) + NO_SHIFT
    carried = tl.zeros_like(decay)
    sums = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    low = (block + 1) * BLOCK_N
    unfinished = walking * 0 + 1
    while walking > 0:
        low = block * BLOCK_N
        column = tl.arange(0, BLOCK_N)
        key = low + column
        wanted = 1
        if index_low is not None:
            index_block = low // INDEX_BLOCK
            summary = (flat_key_head * index_blocks + index_block).to(tl.int64) * HEAD_SIZE
            least = tl.load(index_low + summary + channel, mask=channel < HEAD_SIZE, other=0.0)
            most = tl.load(index_high + summary + channel, mask=channel < HEAD_SIZE, other=0.0)
            query_values = q_tile.to(tl.float32)
            best = tl.sum(tl.maximum(query_values * least[None, :], query_values * most[None, :]), 1)
            norm = tl.load(index_norm + flat_key_head.to(tl.int64) * (1 + index_blocks) + 1 + index_block)
            # inf or NaN is never below a limit: a block that holds a non-finite key is always read.
            certain = (best + q_norm * norm * (16.0 * HEAD_SIZE * BAND) <= limit) | ~real
            wanted = 1 - tl.min(certain.to(tl.int32), 0)
        if wanted > 0:
            k_block = k + low.to(tl.int64) * stride_kt
            v_block = v + low.to(tl.int64) * stride_vt
            k_tile = load_tile(k_block, column, stride_kt, key < keys, HEAD_SIZE, BLOCK_D)
            dot = products(
                q_tile, k_tile, q, q_offset, real, k_block, stride_kt, key < keys, tl.minimum(block, 0), HEAD_SIZE,
                BLOCK_D, True,
            )  # fmt: skip
            norms = norms_above(k_tile)
            key_norm = tl.max(tl.where(norms < INF, norms, 0.0), 0)
            finite = (tl.max(q_norm, 0) * tl.max(norms, 0) < FINITE).to(tl.int32)
            dot, _some = decide(
                dot, visible_keys(key, first, last, padding, keys), limit,
                (q_norm * (HEAD_SIZE * BAND) * key_norm)[:, None], 1 - finite, 0, q, q_offset, real, k_block, stride_kt,
                v_block, stride_vt, key < keys, threshold, threshold_value, threshold_rest, flat_row, scale, scale_rest,
                HEAD_SIZE, BLOCK_D, CHUNK,
            )  # fmt: skip
            keep = is_kept(dot, limit)
            v_tile = load_tile(v_block, column, stride_vt, key < keys, HEAD_SIZE, BLOCK_D)
            bad_value = tl.max(1 - is_finite(v_tile).to(tl.int32), 1) > 0
            v_tile = without_non_finite(v_tile)
            dot = tl.where(keep & bad_value[None, :], float("nan"), dot)
            nearer = kept_nearer(keep, BLOCK_N, BY_TRIANGLE) + carried[:, None]
            logit = dot * (scale * LOG2E) + nearer * decay[:, None]
            top = tl.maximum(shift, tl.max(tl.where(keep, logit, NO_SHIFT), 1))
            rescale = tl.exp2(shift - top)
            weight = tl.where(keep, tl.exp2(logit - top[:, None]), 0.0)
            total = total * rescale + tl.sum(weight, 1)
            carried += tl.sum(keep.to(tl.float32), 1)
            if DROPOUT:
                weight = tl.where(survivors(row_keys, key, drop_limit), weight, 0.0)
            sums = multiply(weight.to(v_tile.dtype), v_tile, sums * rescale[:, None])
            shift = top
        remaining = low - first
        have = tl.log2(total) + shift if NEAR else known
        done = rest_is_small(
            upper,
            decay,
            before + carried,
            remaining.to(tl.float32),
            have,
            inverse,
            log_tolerance,
            steepest,
            False,
            False,
        )
        unfinished = tl.max((real & (remaining > 0) & ~done).to(tl.int32), 0)
        block -= 1
        walking = unfinished * (block >= stop_block).to(tl.int32)

    if NEAR:
        tl.store(settled + flat_key_head, 1 - unfinished)
    tl.store(row_parts + index, total)
    tl.store(row_parts + plane + index, shift)
    tl.store(row_parts + 2 * plane + index, carried)
    tl.store(part_low + flat_key_head * all_parts + part, low)
    offset = (flat_key_head * all_parts + part).to(tl.int64) * BLOCK_M * HEAD_SIZE
    pointers = part_sums + offset + index[:, None] * HEAD_SIZE + channel[None, :]
    tl.store(pointers, sums, mask=(index >= 0)[:, None] & (channel < HEAD_SIZE)[None, :])


@triton.jit(do_not_specialize=UNSPECIALISED)
def join_kernel(
    log_decay,
    exclude_self,
    first_real,
    first_key,
    part_sums,
    part_rows,
    part_low,
    settled,
    out,
    normaliser,
    reach,
    kept,
    stride_ob,
    stride_oh,
    stride_ot,
    query_heads,
    group,
    queries,
    keys,
    query_start,
    key_heads,
    all_parts,
    survivor_scale,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """The parts of every row, rightmost first, as one. One program per key head."""
    flat_key_head = tl.program_id(0)
    batch = flat_key_head // key_heads
    key_head = flat_key_head % key_heads
    index = tl.arange(0, BLOCK_M)
    channel = tl.arange(0, BLOCK_D)
    query = index // group
    real = index < queries * group
    head = tl.where(real, key_head * group + index % group, 0)
    flat_row = (batch * query_heads + head).to(tl.int64) * queries + query
    decay, decay_bad = row_decays(log_decay, flat_row, real)
    decay = decay * LOG2E
    position = query_start + query
    first, last = row_ranges(query, real, head, batch, query_start, keys, exclude_self, first_key, first_real)

    plane = tl.num_programs(0).to(tl.int64) * all_parts * BLOCK_M
    parts = tl.where(tl.load(settled + flat_key_head) > 0, 1, all_parts)
    total = tl.zeros_like(decay)
    shift = tl.zeros_like(decay) + NO_SHIFT
    carried = tl.zeros_like(decay)
    sums = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    low = keys + index * 0
    for part in range(0, parts):
        row = part_rows + (flat_key_head * all_parts + part).to(tl.int64) * BLOCK_M + index
        part_total = tl.load(row)
        part_count = tl.load(row + 2 * plane)
        some = part_count > 0
        part_shift = tl.where(some, tl.load(row + plane) + decay * carried, NO_SHIFT)
        top = tl.maximum(shift, part_shift)
        mine = tl.exp2(shift - top)
        theirs = tl.where(some, tl.exp2(part_shift - top), 0.0)
        offset = (flat_key_head * all_parts + part).to(tl.int64) * BLOCK_M * HEAD_SIZE
        pointers = part_sums + offset + index[:, None] * HEAD_SIZE + channel[None, :]
        part_sum = tl.load(pointers, mask=(index >= 0)[:, None] & (channel < HEAD_SIZE)[None, :], other=0.0)
        total = total * mine + part_total * theirs
        sums = sums * mine[:, None] + part_sum * theirs[:, None]
        carried += part_count
        shift = top
        low = tl.minimum(low, tl.load(part_low + flat_key_head * all_parts + part))

    empty = carried == 0
    bad = (decay_bad & ~empty) | (total != total)
    result = sums * tl.where(empty, 0.0, survivor_scale / tl.where(empty, 1.0, total))[:, None]
    result = tl.where(bad[:, None], float("nan"), result)
    log_total = tl.where(empty, INF, (tl.log2(total) + shift) * LN2)
    row_out = out + batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh + query.to(tl.int64) * stride_ot
    mask = real[:, None] & (channel < HEAD_SIZE)[None, :]
    tl.store(row_out[:, None] + channel[None, :], result.to(out.dtype.element_ty), mask=mask)
    tl.store(normaliser + flat_row, tl.where(bad, float("nan"), log_total), mask=real)
    reached = tl.maximum(low, first)
    tl.store(reach + flat_row, tl.where(reached <= last, reached, position + 1), mask=real)
    tl.store(kept + flat_row, carried.to(tl.int32), mask=real)


def is_decode(problem: Problem) -> bool:
    """Few queries that need no gradient."""
    queries = problem.q.shape[2]
    return not problem.needs_grad and queries <= MOST_QUERIES and queries * problem.heads_per_key_head <= MOST_ROWS


def decode(problem: Problem) -> Forward:
    q, k = problem.q, problem.k
    result = empty_forward(problem)
    if 0 in q.shape:
        return result
    batch, key_heads, head_size = k.shape[0], k.shape[1], k.shape[3]
    rows = max(16, 1 << (q.shape[2] * problem.heads_per_key_head - 1).bit_length())
    chosen = configuration("decode", q.dtype, head_size)
    keys = problem.query_start + q.shape[2]
    rest = max(0, -(-keys // chosen.keys) - NEAR_KEYS // chosen.keys)  # blocks beyond the nearest keys
    splits = min(MOST_SPLITS, -(-rest * chosen.keys // SPLIT_KEYS))
    split_blocks = -(-rest // splits) if splits else 1
    parts = 1 + splits
    heads = batch * key_heads
    part_rows = torch.empty(3, heads, parts, rows, dtype=torch.float32, device=q.device)
    part_sums = torch.empty(heads, parts, rows, head_size, dtype=torch.float32, device=q.device)
    part_low = torch.empty(heads, parts, dtype=torch.int32, device=q.device)
    settled = torch.empty(heads, dtype=torch.int32, device=q.device)
    low, high, norm = problem.key_low, problem.key_high, problem.key_norm
    if low is not None and (low.shape[:2] != k.shape[:2] or low.shape[3] != head_size or low.shape[2] * BLOCK < keys):
        raise InputError(f"key_index {list(low.shape)} does not belong to keys {list(k.shape)}")
    largest = None
    if norm is not None:
        largest = norm.select(2, 0).contiguous()
    elif problem.score_bound is None and problem.tolerance > 0.0:
        largest = summarise(problem, chosen.keys).norm_so_far.select(2, -1).contiguous()
    align = alignment(q, k, problem.v)
    common = common_arguments(problem, align)
    scale = common.pop("survivor_scale")
    del common["SURROGATE"]
    for near in (True, False) if splits else (True,):
        launch(
            decode_kernel,
            heads if near else heads * splits,
            q,
            **common,
            score_bound=problem.score_bound,
            largest_norm=largest,
            index_low=low,
            index_high=high,
            index_norm=norm,
            part_sums=part_sums,
            part_rows=part_rows,
            part_low=part_low,
            settled=settled,
            index_blocks=0 if low is None else low.shape[2],
            key_heads=key_heads,
            all_parts=parts,
            split_blocks=split_blocks,
            near_keys=NEAR_KEYS,
            log_tolerance=math.log2(problem.tolerance * 0.9999) if problem.tolerance > 0.0 else math.nan,
            NEAR=near,
            BLOCK_M=rows,
            INDEX_BLOCK=BLOCK,
            BLOCK_N=chosen.keys,
            num_warps=chosen.warps,
        )
    launch(
        join_kernel,
        heads,
        q,
        **{name: common[name] for name in ("log_decay", "exclude_self", "first_real", "first_key")},
        part_sums=part_sums,
        part_rows=part_rows,
        part_low=part_low,
        settled=settled,
        **result._asdict(),
        **strides(1, o=result.out),
        **{name: common[name] for name in ("query_heads", "group", "queries", "keys", "query_start")},
        key_heads=key_heads,
        all_parts=parts,
        survivor_scale=scale,
        HEAD_SIZE=head_size,
        BLOCK_D=block_d(head_size),
        BLOCK_M=rows,
        num_warps=4,
    )
    return result
