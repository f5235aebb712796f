"""The backward walk, in two kernels without atomics. With P the weights and Delta = dO . O,

    dS = P (dO V^T - Delta) on kept keys,   dQ = scale dS K,   dg = sum dS (c - 1),   dV = P^T dO,   dK = scale dS^T Q;

a surrogate of width w adds P y (1 - y) / w (dO V^T - Delta), y = sigmoid((s - threshold) / w), to dS of every key that
the row sees, and minus the sum of these terms is the threshold's gradient.

`query_gradient_kernel` walks each block of queries again as the forward did and stops where it stopped. A block of keys
cannot know how many kept keys lie between it and a query, so this kernel also writes down each row's count at the right
edge of STRIPS column strips. `key_gradient_kernel` has one program per strip, which takes its key blocks from right to
left and, for each, all queries that reached it; after a block it moves the strip's counts on in place. So every count
is exact, every sum has one owner and one order, and memory is O(T).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from traformer.ops.threshold_relative.problem import Gradients, Problem, Saved, empty_gradients
from traformer.ops.threshold_relative.triton.configurations import STRIPS, UNSPECIALISED, alignment, configuration
from traformer.ops.threshold_relative.triton.launching import channels_together, common_arguments, launch, strides
from traformer.ops.threshold_relative.triton.summaries import summarise
from traformer.ops.threshold_relative.triton.tiles import (
    BAND,
    INF,
    LOG2E,
    decide,
    dropout_keys,
    is_finite,
    is_kept,
    is_visible,
    kept_nearer,
    key_norms,
    load_tile,
    look,
    may_keep,
    multiply,
    norms_above,
    norms_above_squares,
    products,
    row_decays,
    row_limits,
    row_ranges,
    store_tile,
    survivors,
    visible_keys,
    without_non_finite,
)


@triton.jit
def differentiate(
    dot,  # [M, N]
    keep,
    nearer,  # [M, N] kept keys right of each key, the whole row's
    change,  # [M, N] dO V^T, 0 in broken rows
    decay,  # [M] base 2
    log_sum,  # [M] base 2; inf: kept nothing; NaN: broken
    delta,  # [M]
    limit,  # [M]
    row_keys,
    key,
    scale,
    steepness,  # 1 / surrogate width
    drop_limit,
    survivor_scale,
    SURROGATE: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """The weights that multiplied the values, dS by the weights, and dS by the surrogate; each [M, N] fp32."""
    if_kept = tl.exp2(dot * (scale * LOG2E) + (nearer * decay[:, None] - log_sum[:, None]))
    applied = tl.where(keep, if_kept, 0.0)
    if DROPOUT:
        alive = survivors(row_keys, key, drop_limit)
        change = tl.where(alive, change * survivor_scale, 0.0)
        applied = tl.where(alive, applied * survivor_scale, applied * 0.0)  # NaN stays
    change = if_kept * (change - delta[:, None])
    pull = tl.zeros_like(dot)
    if SURROGATE:
        away = tl.abs(dot - limit[:, None]) * (scale * steepness)
        soft = tl.exp2(-away * LOG2E)  # y (1 - y) = e^-x / (1 + e^-x)^2, even in x
        pull = change * (soft / ((1.0 + soft) * (1.0 + soft)) * steepness)
        # A removed key whose value is not finite has NaN here, and so has every key that a broken row sees.
        pull = tl.where(is_visible(dot) & (log_sum != INF)[:, None], pull + pull * 0.0, 0.0)
    return applied, tl.where(keep, change, 0.0), pull


@triton.jit
def row_facts(
    q, stride_q, g, stride_g, out, stride_o, index, real, zero, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr
):
    """[M] each: bounds of |q|, dO . O, and whether dO is not finite.

    A few channels at a time: three whole tiles in fp32 are more than the walk itself holds. zero: see products.
    """
    PIECE: tl.constexpr = 16
    squares = tl.zeros_like(index).to(tl.float32)
    delta = tl.zeros_like(squares)
    bad = tl.zeros_like(index)
    for start in range(0, BLOCK_D + zero, PIECE):
        channel = start + tl.arange(0, PIECE)
        inside = real[:, None] & (channel < HEAD_SIZE)[None, :]
        q_piece = tl.load(q + (index * stride_q)[:, None] + channel[None, :], inside, 0.0).to(tl.float32)
        g_piece = tl.load(g + (index * stride_g)[:, None] + channel[None, :], inside, 0.0).to(tl.float32)
        o_piece = tl.load(out + (index * stride_o)[:, None] + channel[None, :], inside, 0.0).to(tl.float32)
        squares += tl.sum(q_piece * q_piece, 1)
        delta += tl.sum(g_piece * o_piece, 1)
        bad = tl.maximum(bad, tl.max(1 - is_finite(g_piece).to(tl.int32), 1))
    return norms_above_squares(squares), delta, bad > 0


@triton.jit(do_not_specialize=UNSPECIALISED)
def query_gradient_kernel(
    q,
    k,
    v,
    log_decay,
    threshold,
    exclude_self,
    padding,
    first_real,
    first_key,
    seed,
    norm,
    value,
    grad_out,
    out,
    normaliser,
    reach,
    log_sums,  # out, fp32 [B, Hq, Tq]: the normaliser in base 2; NaN where a row's gradient is not finite
    deltas,  # out, fp32 [B, Hq, Tq]
    counts,  # out, fp32 [B * Hq, STRIPS, Tq]: kept keys right of each strip that a row reaches
    grad_q,
    grad_decay,
    grad_threshold,
    stride_qb,
    stride_qh,
    stride_qt,
    stride_kb,
    stride_kh,
    stride_kt,
    stride_vb,
    stride_vh,
    stride_vt,
    stride_gb,
    stride_gh,
    stride_gt,
    stride_ob,
    stride_oh,
    stride_ot,
    stride_dqb,
    stride_dqh,
    stride_dqt,
    query_heads,
    group,
    queries,
    keys,
    query_start,
    padding_stride,
    blocks,
    row_blocks,
    strips,
    strip_blocks,
    threshold_value,
    threshold_rest,
    scale,
    scale_rest,
    steepness,
    drop_limit,
    survivor_scale,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    ALIGN: tl.constexpr,
    SURROGATE: tl.constexpr,
    DROPOUT: tl.constexpr,
    BY_TRIANGLE: tl.constexpr,
):
    program = tl.program_id(0)
    row_block = row_blocks - 1 - program % row_blocks
    flat_head = program // row_blocks
    batch = flat_head // query_heads
    head = flat_head % query_heads
    key_head = head // group
    flat_key_head = batch * (query_heads // group) + key_head
    wide_batch = batch.to(tl.int64)
    wide_head = head.to(tl.int64)
    wide_key_head = key_head.to(tl.int64)
    stride_qt = stride_qt * ALIGN
    stride_kt = stride_kt * ALIGN
    stride_vt = stride_vt * ALIGN
    stride_gt = stride_gt * ALIGN
    stride_ot = stride_ot * ALIGN
    stride_dqt = stride_dqt * ALIGN
    q += wide_batch * stride_qb * ALIGN + wide_head * stride_qh * ALIGN
    k += wide_batch * stride_kb * ALIGN + wide_key_head * stride_kh * ALIGN
    v += wide_batch * stride_vb * ALIGN + wide_key_head * stride_vh * ALIGN
    grad_out += wide_batch * stride_gb * ALIGN + wide_head * stride_gh * ALIGN
    out += wide_batch * stride_ob * ALIGN + wide_head * stride_oh * ALIGN
    grad_q += wide_batch * stride_dqb * ALIGN + wide_head * stride_dqh * ALIGN
    if padding is not None:
        padding += wide_batch * padding_stride
    row0 = row_block * BLOCK_M
    q += row0.to(tl.int64) * stride_qt
    grad_out += row0.to(tl.int64) * stride_gt
    out += row0.to(tl.int64) * stride_ot
    grad_q += row0.to(tl.int64) * stride_dqt
    index = tl.arange(0, BLOCK_M)
    q_offset = index * stride_qt
    row = row0 + index
    real = row < queries
    flat_row = flat_head.to(tl.int64) * queries + row
    counts += flat_head.to(tl.int64) * strips * queries
    norm += flat_key_head.to(tl.int64) * blocks
    value += flat_key_head.to(tl.int64) * blocks

    q_norm, delta, bad_gradient = row_facts(
        q, stride_qt, grad_out, stride_gt, out, stride_ot, index, real, tl.minimum(queries, 0), HEAD_SIZE, BLOCK_D
    )
    log_sum = tl.load(normaliser + flat_row, mask=real, other=INF) * LOG2E
    # A row that is not finite gives NaN to the keys it keeps and leaves the others alone.
    broken = bad_gradient | ~(tl.abs(delta) < INF) | (log_sum != log_sum)
    log_sum = tl.where(broken, float("nan"), log_sum)
    delta = tl.where(broken, 0.0, delta)
    sound = real & ~broken
    q_tile = load_tile(q, index, stride_qt, real, HEAD_SIZE, BLOCK_D)
    g_tile = load_tile(grad_out, index, stride_gt, sound, HEAD_SIZE, BLOCK_D)
    tl.store(log_sums + flat_row, log_sum, mask=real)
    tl.store(deltas + flat_row, delta, mask=real)

    decay, _decay_bad = row_decays(log_decay, flat_row, real)
    decay = decay * LOG2E
    limit = row_limits(threshold, threshold_value, scale, flat_row, real)
    first, last = row_ranges(row, real, head, batch, query_start, keys, exclude_self, first_key, first_real)
    reached = tl.load(reach + flat_row, mask=real, other=keys)
    first = tl.maximum(first, reached)
    row_keys = row.to(tl.uint32)
    if DROPOUT:
        row_keys = dropout_keys(seed, flat_head, query_start + row)

    end = tl.max(last, 0)
    start_block = tl.where(end < 0, -1, end // BLOCK_N)
    stop_block = tl.min(first, 0) // BLOCK_N
    carried = tl.zeros_like(decay)
    decay_sum = tl.zeros_like(decay)
    threshold_sum = tl.zeros_like(decay)
    sums = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    block = start_block
    while block >= stop_block:
        if (block == start_block) | (block % strip_blocks == strip_blocks - 1):
            tl.store(counts + (block // strip_blocks).to(tl.int64) * queries + row, carried, mask=real)
        k_tile, dot, some = look(
            block, q_tile, q_norm, limit, first, last, padding, norm, value, q, q_offset, real, k, stride_kt, v,
            stride_vt, keys, threshold, threshold_value, threshold_rest, flat_row, scale, scale_rest, HEAD_SIZE,
            BLOCK_D, BLOCK_N, CHUNK,
        )  # fmt: skip
        key = block * BLOCK_N + tl.arange(0, BLOCK_N)
        low = block * BLOCK_N
        column = tl.arange(0, BLOCK_N)
        v_block = v + low.to(tl.int64) * stride_vt
        v_tile = load_tile(v_block, column, stride_vt, low + column < keys, HEAD_SIZE, BLOCK_D)
        if tl.load(norm + block) < 0.0:
            k_tile = without_non_finite(k_tile)
        keep = is_kept(dot, limit)
        nearer = kept_nearer(keep, BLOCK_N, BY_TRIANGLE) + carried[:, None]
        change = products(
            g_tile, v_tile, grad_out, index * stride_gt, sound, v_block, stride_vt, key < keys, tl.minimum(block, 0),
            HEAD_SIZE, BLOCK_D, False,
        )  # fmt: skip
        _applied, change, pull = differentiate(
            dot, keep, nearer, change, decay, log_sum, delta, limit, row_keys, key, scale, steepness,
            drop_limit, survivor_scale, SURROGATE, DROPOUT,
        )  # fmt: skip
        decay_sum += tl.sum(change * nearer, 1)
        if SURROGATE:
            threshold_sum -= tl.sum(pull, 1)
            change += pull
        sums = multiply(change.to(k_tile.dtype), k_tile, sums)
        carried += tl.sum(keep.to(tl.float32), 1)
        block -= 1
        if not SURROGATE:  # with one, removed keys have a gradient too
            passing = (some == 0) & (block >= stop_block)
            while passing:
                found = may_keep(
                    block, q_norm, limit, first, last, padding, norm, q, q_offset, real, k, stride_kt, keys, HEAD_SIZE,
                    BLOCK_D, BLOCK_N,
                )  # fmt: skip
                if (found == 0) & (block % strip_blocks == strip_blocks - 1):
                    tl.store(counts + (block // strip_blocks).to(tl.int64) * queries + row, carried, mask=real)
                block = tl.where(found > 0, block, block - 1)
                passing = (found == 0) & (block >= stop_block)

    store_tile(grad_q, index, stride_dqt, real, sums * scale, HEAD_SIZE, BLOCK_D)
    tl.store(grad_decay + flat_row, decay_sum.to(grad_decay.dtype.element_ty), mask=real)
    if SURROGATE:
        tl.store(grad_threshold + flat_row, threshold_sum, mask=real)


@triton.jit(do_not_specialize=UNSPECIALISED)
def key_gradient_kernel(
    q,
    k,
    v,
    log_decay,
    threshold,
    exclude_self,
    padding,
    first_real,
    first_key,
    seed,
    norm,
    value,
    grad_out,
    reach,
    log_sums,
    deltas,
    counts,  # read, and moved on from block to block
    block_reach,  # int32 [B * Hq, row_blocks]: the leftmost key that a block of queries reads
    last_block,  # int32 [B * Hq, blocks]: the last block of queries that reads a block of keys, or -1
    grad_k,
    grad_v,
    stride_qb,
    stride_qh,
    stride_qt,
    stride_kb,
    stride_kh,
    stride_kt,
    stride_vb,
    stride_vh,
    stride_vt,
    stride_gb,
    stride_gh,
    stride_gt,
    stride_dkb,
    stride_dkh,
    stride_dkt,
    stride_dvb,
    stride_dvh,
    stride_dvt,
    query_heads,
    group,
    queries,
    keys,
    all_keys,  # keys after the last query have gradient 0
    query_start,
    padding_stride,
    blocks,
    row_blocks,
    strips,
    strip_blocks,
    threshold_value,
    threshold_rest,
    scale,
    scale_rest,
    steepness,
    drop_limit,
    survivor_scale,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    ALIGN: tl.constexpr,
    SURROGATE: tl.constexpr,
    DROPOUT: tl.constexpr,
    BY_TRIANGLE: tl.constexpr,
):
    program = tl.program_id(0)
    strip = program % strips
    flat_key_head = program // strips
    key_heads = query_heads // group
    batch = flat_key_head // key_heads
    key_head = flat_key_head % key_heads
    wide_batch = batch.to(tl.int64)
    wide_key_head = key_head.to(tl.int64)
    stride_qt = stride_qt * ALIGN
    stride_qh = stride_qh * ALIGN
    stride_kt = stride_kt * ALIGN
    stride_vt = stride_vt * ALIGN
    stride_gt = stride_gt * ALIGN
    stride_gh = stride_gh * ALIGN
    stride_dkt = stride_dkt * ALIGN
    stride_dvt = stride_dvt * ALIGN
    q += wide_batch * stride_qb * ALIGN
    grad_out += wide_batch * stride_gb * ALIGN
    k += wide_batch * stride_kb * ALIGN + wide_key_head * stride_kh * ALIGN
    v += wide_batch * stride_vb * ALIGN + wide_key_head * stride_vh * ALIGN
    grad_k += wide_batch * stride_dkb * ALIGN + wide_key_head * stride_dkh * ALIGN
    grad_v += wide_batch * stride_dvb * ALIGN + wide_key_head * stride_dvh * ALIGN
    if padding is not None:
        padding += wide_batch * padding_stride
    norm += flat_key_head.to(tl.int64) * blocks
    value += flat_key_head.to(tl.int64) * blocks
    index = tl.arange(0, BLOCK_M)
    q_offset = index * stride_qt
    column = tl.arange(0, BLOCK_N)

    block = (strip + 1) * strip_blocks - 1
    while block >= strip * strip_blocks:
        low = block * BLOCK_N
        key = low + column
        k_block = k + low.to(tl.int64) * stride_kt
        v_block = v + low.to(tl.int64) * stride_vt
        k_sums = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
        v_sums = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
        if block < blocks:
            k_tile = load_tile(k_block, column, stride_kt, key < keys, HEAD_SIZE, BLOCK_D)
            v_tile = load_tile(v_block, column, stride_vt, key < keys, HEAD_SIZE, BLOCK_D)
            values_bad = (tl.load(value + block) == INF).to(tl.int32)
            for member in range(0, group):
                head = key_head * group + member
                flat_head = batch * query_heads + head
                wide_head = head.to(tl.int64)
                last_row_block = tl.load(last_block + flat_head.to(tl.int64) * blocks + block)
                row_block = tl.maximum(low - query_start, 0) // BLOCK_M
                while row_block <= last_row_block:
                    if tl.load(block_reach + flat_head.to(tl.int64) * row_blocks + row_block) < low + BLOCK_N:
                        row0 = row_block * BLOCK_M
                        row = row0 + index
                        real = row < queries
                        flat_row = flat_head.to(tl.int64) * queries + row
                        q_block = q + wide_head * stride_qh + row0.to(tl.int64) * stride_qt
                        g_block = grad_out + wide_head * stride_gh + row0.to(tl.int64) * stride_gt
                        q_tile = load_tile(q_block, index, stride_qt, real, HEAD_SIZE, BLOCK_D)
                        dot = products(
                            q_tile, k_tile, q_block, q_offset, real, k_block, stride_kt, key < keys,
                            tl.minimum(row_block, 0), HEAD_SIZE, BLOCK_D, True,
                        )  # fmt: skip
                        limit = row_limits(threshold, threshold_value, scale, flat_row, real)
                        first, last = row_ranges(
                            row, real, head, batch, query_start, keys, exclude_self, first_key, first_real
                        )
                        reached = tl.load(reach + flat_row, mask=real, other=keys)
                        first = tl.maximum(first, reached)
                        visible = visible_keys(key, first, last, padding, keys)
                        q_norm = norms_above(q_tile)
                        key_norm, overflow = key_norms(norm, block, q_norm)
                        dot, some = decide(
                            dot, visible, limit, (q_norm * (HEAD_SIZE * BAND) * key_norm)[:, None], overflow,
                            values_bad, q_block, q_offset, real, k_block, stride_kt, v_block, stride_vt, key < keys,
                            threshold, threshold_value, threshold_rest, flat_row, scale, scale_rest, HEAD_SIZE, BLOCK_D,
                            CHUNK,
                        )  # fmt: skip
                        if SURROGATE:
                            some = 2
                        if some > 0:
                            count = counts + (flat_head.to(tl.int64) * strips + strip) * queries + row
                            carried = tl.load(count, mask=real, other=0.0)
                            decay, _decay_bad = row_decays(log_decay, flat_row, real)
                            log_sum = tl.load(log_sums + flat_row, mask=real, other=INF)
                            delta = tl.load(deltas + flat_row, mask=real, other=0.0)
                            row_keys = row.to(tl.uint32)
                            if DROPOUT:
                                row_keys = dropout_keys(seed, flat_head, query_start + row)
                            # A broken row gives NaN to the keys it sees; what else it holds must not reach the others.
                            sound = real & (log_sum == log_sum)
                            g_tile = load_tile(g_block, index, stride_gt, sound, HEAD_SIZE, BLOCK_D)
                            q_tile = load_tile(q_block, index, stride_qt, sound, HEAD_SIZE, BLOCK_D)
                            keep = is_kept(dot, limit)
                            nearer = kept_nearer(keep, BLOCK_N, BY_TRIANGLE) + carried[:, None]
                            change = products(
                                g_tile, v_tile, g_block, index * stride_gt, sound, v_block, stride_vt, key < keys,
                                tl.minimum(row_block, 0), HEAD_SIZE, BLOCK_D, False,
                            )  # fmt: skip
                            applied, change, pull = differentiate(
                                dot, keep, nearer, change, decay * LOG2E, log_sum, delta, limit,
                                row_keys, key, scale, steepness, drop_limit, survivor_scale, SURROGATE, DROPOUT,
                            )  # fmt: skip
                            if SURROGATE:
                                change += pull
                            v_sums = multiply(tl.trans(applied.to(g_tile.dtype)), g_tile, v_sums)
                            k_sums = multiply(tl.trans(change.to(q_tile.dtype)), q_tile, k_sums)
                            tl.store(count, carried + tl.sum(keep.to(tl.float32), 1), mask=real)
                    row_block += 1
        stored = key < all_keys
        store_tile(
            grad_k + low.to(tl.int64) * stride_dkt, column, stride_dkt, stored, k_sums * scale, HEAD_SIZE, BLOCK_D
        )
        store_tile(grad_v + low.to(tl.int64) * stride_dvt, column, stride_dvt, stored, v_sums, HEAD_SIZE, BLOCK_D)
        tl.debug_barrier()  # the next block reads the counts that this one wrote
        block -= 1


def backward(problem: Problem, grad_out: Tensor, saved: Saved) -> Gradients:
    q, k, v = problem.q, problem.k, problem.v
    batch, heads, queries, head_size = q.shape
    over_queries = configuration("query_gradient", q.dtype, head_size)
    over_keys = configuration("key_gradient", q.dtype, head_size)
    assert over_queries.keys == over_keys.keys
    gradients = empty_gradients(problem)
    if 0 in q.shape:
        for x in gradients:
            x.zero_()
        return gradients
    grad_out, out = channels_together(grad_out.to(q.dtype)), channels_together(saved.out)
    summaries = summarise(problem, over_keys.keys)
    blocks = summaries.norm.shape[2]
    all_blocks = -(-k.shape[2] // over_keys.keys)
    strips = min(STRIPS, all_blocks)
    strip_blocks = -(-all_blocks // strips)
    log_sums, deltas = torch.empty_like(saved.normaliser), torch.empty_like(saved.normaliser)
    counts = torch.empty(batch * heads, strips, queries, dtype=torch.float32, device=q.device)
    align = alignment(q, k, v, out, grad_out, *gradients[:3])
    common = common_arguments(problem, align)
    del common["steepest"]
    common |= {
        "steepness": 1.0 / problem.surrogate_width if problem.surrogate_width else 0.0,
        "norm": summaries.norm,
        "value": summaries.value,
        "grad_out": grad_out,
        "reach": saved.reach,
        "log_sums": log_sums,
        "deltas": deltas,
        "counts": counts,
        **strides(align, g=grad_out),
        "blocks": blocks,
        "strips": strips,
        "strip_blocks": strip_blocks,
    }
    row_blocks = -(-queries // over_queries.rows)
    launch(
        query_gradient_kernel,
        batch * heads * row_blocks,
        q,
        **common,
        out=out,
        normaliser=saved.normaliser,
        grad_q=gradients.q,
        grad_decay=gradients.log_decay,
        grad_threshold=gradients.threshold if problem.surrogate_width else None,
        **strides(align, o=out, dq=gradients.q),
        row_blocks=row_blocks,
        BLOCK_M=over_queries.rows,
        BLOCK_N=over_queries.keys,
        num_warps=over_queries.warps,
    )
    block_reach, last_block = readers(saved.reach, over_keys.rows, over_keys.keys, blocks)
    launch(
        key_gradient_kernel,
        batch * k.shape[1] * strips,
        q,
        **common,
        block_reach=block_reach,
        last_block=last_block,
        grad_k=gradients.k,
        grad_v=gradients.v,
        **strides(align, dk=gradients.k, dv=gradients.v),
        all_keys=k.shape[2],
        row_blocks=block_reach.shape[-1],
        BLOCK_M=over_keys.rows,
        BLOCK_N=over_keys.keys,
        num_warps=over_keys.warps,
    )
    return gradients


def readers(reach: Tensor, rows: int, keys: int, blocks: int) -> tuple[Tensor, Tensor]:
    """Which blocks of queries read a block of keys: block_reach and last_block of key_gradient_kernel."""
    row_blocks = -(-reach.shape[2] // rows)
    padded = torch.nn.functional.pad(reach, (0, row_blocks * rows - reach.shape[2]), value=blocks * keys)
    block_reach = padded.unflatten(2, (row_blocks, rows)).amin(-1)  # [B, Hq, row_blocks]
    # Scatter each block of queries to the leftmost block of keys it reads; the last one so far is the last reader.
    leftmost = (block_reach // keys).clamp(max=blocks - 1).to(torch.int64)
    order = torch.arange(row_blocks, device=reach.device).expand_as(leftmost)
    last = torch.full((*reach.shape[:2], blocks), -1, dtype=torch.int64, device=reach.device)
    last = last.scatter_reduce(-1, leftmost, order, "amax").cummax(-1).values
    return block_reach.contiguous(), last.to(torch.int32)
