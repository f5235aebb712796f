"""What all kernels do with one tile of M queries and N keys: the choice of keys, counts, dropout, the early exit.

Scores are held as plain products q.k (fp32), thresholds divided by the scale, logits in powers of two. The choice of
keys is canonical (see decision.py): every kernel calls `decide`, which settles scores within rounding of the threshold
by an fp64 sum, so forward, backward and decode keep the same keys whatever their tile shapes and instructions.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

# The interpreter multiplies the bits of bf16 tiles as if they were integers; it gets their values in fp32 instead.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")

# How fp32 products other than q.k are made: AMD has instructions for them, NVIDIA's tensor cores take sums of bf16.
SINGLE = tl.constexpr("ieee" if torch.version.hip else "bf16x6")

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
INF = tl.constexpr(float("inf"))
BAND = tl.constexpr(2.0**-22)  # times D |q| |k|: no two ways of summing a product differ by more
NORM_SLACK = tl.constexpr(1.0001)  # computed norms are rounded; this keeps them upper bounds
NORM_FLOOR = tl.constexpr(1e-16)  # squares of smaller entries may underflow
NO_SHIFT = tl.constexpr(-1e30)  # a running maximum before its first score
# Weights of at most 2^HALF_TOP fit into fp16, and rows shifted down by at most HALF_SHIFT stay above its subnormals.
HALF_TOP = tl.constexpr(14.0)
HALF_SHIFT = tl.constexpr(12.0)
FINITE = tl.constexpr(1e36)  # products below this bound cannot overflow
ROOM = tl.constexpr(122.0)  # sums of weights and values below 2^ROOM cannot overflow fp32


@triton.jit
def multiply(a, b, sums):
    """a @ b + sums in fp32, on tensor cores. fp32 operands keep their bits: plain, or as sums of three bf16 numbers."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), sums)
    elif a.dtype == tl.float32:
        return tl.dot(a, b, sums, input_precision=SINGLE)
    else:
        return tl.dot(a, b, sums)


@triton.jit
def products(
    q_tile,
    k_tile,
    q_block,
    q_offset,
    rows_valid,
    k_block,
    stride_k,
    keys_valid,
    zero,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EXACT: tl.constexpr,
):
    """q.k [M, N]; in fp32 and beyond 128 channels a few at a time, since all would not fit into registers.

    EXACT: fp32 products by IEEE arithmetic, since keys are chosen by them.
    zero: a scalar that is 0 and not known to be, so that the compiler does not unroll the loop.
    """
    sums = tl.zeros((q_tile.shape[0], k_tile.shape[0]), dtype=tl.float32)
    if q_tile.dtype == tl.float32 or BLOCK_D > 128:
        PIECE: tl.constexpr = 16 if q_tile.dtype == tl.float32 else 32
        column = tl.arange(0, k_tile.shape[0])
        for start in range(0, BLOCK_D + zero, PIECE):
            channel = start + tl.arange(0, PIECE)
            inside = (channel < HEAD_SIZE)[None, :]
            a = tl.load(q_block + q_offset[:, None] + channel[None, :], rows_valid[:, None] & inside, 0.0)
            b = tl.load(k_block + column[:, None] * stride_k + channel[None, :], keys_valid[:, None] & inside, 0.0)
            if q_tile.dtype == tl.float32 and EXACT:
                sums = tl.dot(a, tl.trans(b), sums, input_precision="ieee")
            else:
                sums = multiply(a, tl.trans(b), sums)
    else:
        sums = multiply(q_tile, tl.trans(k_tile), sums)
    return sums


@triton.jit
def load_tile(base, index, stride, valid, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr):
    """[len(index), BLOCK_D] rows of a [T, D] matrix whose channels lie side by side; 0 outside."""
    channel = tl.arange(0, BLOCK_D)
    pointers = base + index[:, None] * stride + channel[None, :]
    if HEAD_SIZE == BLOCK_D:
        return tl.load(pointers, mask=valid[:, None], other=0.0)
    return tl.load(pointers, mask=valid[:, None] & (channel < HEAD_SIZE)[None, :], other=0.0)


@triton.jit
def store_tile(base, index, stride, valid, tile, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr):
    channel = tl.arange(0, BLOCK_D)
    pointers = base + index[:, None] * stride + channel[None, :]
    mask = valid[:, None]
    if HEAD_SIZE != BLOCK_D:
        mask = mask & (channel < HEAD_SIZE)[None, :]
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=mask)


@triton.jit
def is_finite(x):
    return tl.abs(x.to(tl.float32)) < INF


@triton.jit
def norms_above(x):
    """Upper bounds of the rows' norms; inf where a row is not finite."""
    x = x.to(tl.float32)
    return norms_above_squares(tl.sum(x * x, 1))


@triton.jit
def norms_above_squares(squares):
    """Upper bounds of norms from computed sums of squares; inf where one is not finite."""
    norm = tl.sqrt(squares) * NORM_SLACK + NORM_FLOOR
    return tl.where(norm < INF, norm, INF)


@triton.jit
def row_norms(base, index, stride, valid, tile, zero, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr):
    """Upper bounds of the norms of a tile's rows; beyond 128 channels read a few at a time. zero: see products."""
    if BLOCK_D > 128:
        PIECE: tl.constexpr = 32
        squares = tl.zeros_like(index).to(tl.float32)
        for start in range(0, BLOCK_D + zero, PIECE):
            channel = start + tl.arange(0, PIECE)
            inside = valid[:, None] & (channel < HEAD_SIZE)[None, :]
            piece = tl.load(base + (index * stride)[:, None] + channel[None, :], inside, 0.0).to(tl.float32)
            squares += tl.sum(piece * piece, 1)
        return norms_above_squares(squares)
    return norms_above(tile)


@triton.jit
def without_non_finite(x):
    return tl.where(is_finite(x), x, 0.0).to(x.dtype)


@triton.jit
def row_limits(threshold, threshold_value, scale, flat_row, real):
    """[M] thresholds of the plain products."""
    if threshold is None:
        limit = tl.zeros_like(flat_row).to(tl.float32) + threshold_value
    else:
        limit = tl.load(threshold + flat_row, mask=real, other=0.0)
    return limit / scale


@triton.jit
def row_decays(log_decay, flat_row, real):
    """[M] decays, 0 where they are not finite, and which those are."""
    decay = tl.load(log_decay + flat_row, mask=real, other=0.0).to(tl.float32)
    bad = ~(tl.abs(decay) < INF)
    return tl.where(bad, 0.0, decay), bad


@triton.jit
def row_ranges(row, real, head, batch, query_start, keys, exclude_self, first_key, first_real):
    """[M] first and last key that each row may see, padding between them apart. head: a scalar or [M]."""
    last = query_start + row
    if exclude_self is not None:
        last -= (tl.load(exclude_self + head) != 0).to(tl.int32)
    first = tl.zeros_like(row)
    if first_key is not None:
        first = tl.load(first_key + row, mask=real, other=0)
    if first_real is not None:
        first = tl.maximum(first, tl.load(first_real + batch))
    return tl.where(real, first, keys), tl.where(real, last, -1)


@triton.jit
def visible_keys(key, first, last, padding, keys):
    """bool [M, N]: key in [first .. last], and not padding."""
    visible = (key[None, :] <= last[:, None]) & (key[None, :] >= first[:, None])
    if padding is not None:
        visible = visible & real_keys(key, padding, keys)[None, :]
    return visible


@triton.jit
def real_keys(key, padding, keys):
    """bool [N]: keys that exist and are not padding. Whatever is in the others' places must not be read."""
    real = key < keys
    if padding is not None:
        real = real & (tl.load(padding + key, mask=real, other=0) != 0)
    return real


@triton.jit
def decide(
    dot,  # [M, N] fp32 products q.k
    visible,  # bool [M, N]
    limit,  # [M] threshold / scale
    band,  # [M] or [M, N]: how far from the limit rounding can matter
    overflow,  # whether some product of the tile may be non-finite: 0 or 1
    values_bad,  # whether some value of the tile is not finite: 0 or 1
    q_block,  # pointers to the tile's first query, key and value
    q_offset,  # [M] of each query from the first
    rows_valid,  # bool [M]
    k_block,
    stride_k,
    v_block,
    stride_v,
    keys_valid,  # bool [N]
    threshold,
    threshold_value,
    threshold_rest,
    flat_row,
    scale,
    scale_rest,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr,  # channels summed at once by the recheck; 1 sums in order
):
    """The products with every choice made, and whether a key may be kept (0: none is).

    A key that the row does not see is -inf. A key is kept where its product is above the limit or NaN: NaN marks what
    poisons the row, a non-finite product that it sees or a kept key whose value is not finite. So one fp32 tile holds
    every choice; `is_kept` and `is_visible` read it, and no mask has to be held in registers.
    """
    dot = tl.where(visible, dot + dot * 0.0, -INF)  # inf becomes NaN
    gap = dot - limit[:, None]
    near = ~(tl.min(tl.abs(gap) - band, 1) > 0.0)
    above = tl.max(gap, 1) > 0.0
    some = tl.maximum(tl.max(tl.where(near, 2, above.to(tl.int32)), 0), overflow)
    careful = (some > 1) | (values_bad * some > 0)
    settled = dot
    if careful:
        settled = recheck(
            settled, limit, band, q_block, q_offset, rows_valid, k_block, stride_k, threshold, threshold_value,
            threshold_rest, flat_row, scale, scale_rest, HEAD_SIZE, CHUNK,
        )  # fmt: skip
        if values_bad > 0:
            value = load_tile(v_block, tl.arange(0, dot.shape[1]), stride_v, keys_valid, HEAD_SIZE, BLOCK_D)
            bad = tl.max(1 - is_finite(value).to(tl.int32), 1) > 0
            settled = tl.where(is_kept(settled, limit) & bad[None, :], float("nan"), settled)
    # A choice, not a branch: two products share a layout, and weights stay in registers between them, only where the
    # compiler sees the second depend on the first without control flow.
    return tl.where(careful, settled, dot), some


@triton.jit
def key_norms(norm, block, q_norm):
    """The largest finite key norm of a block, and whether a product with these queries may be non-finite: 0 or 1."""
    key_norm = tl.load(norm + block)
    overflow = (key_norm < 0.0) | ~(tl.max(q_norm, 0) * key_norm < FINITE)
    return tl.abs(key_norm), overflow.to(tl.int32)


@triton.jit
def look(
    block,
    q_tile,  # [M, D]
    q_norm,  # [M] upper bounds
    limit,
    first,
    last,
    padding,
    norm,  # of the key blocks, see summaries.py
    value,
    q_block,
    q_offset,
    rows_valid,
    k,
    stride_k,
    v,
    stride_v,
    keys,
    threshold,
    threshold_value,
    threshold_rest,
    flat_row,
    scale,
    scale_rest,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One key block as a block of queries sees it: its keys, and what `decide` says of them."""
    low = block * BLOCK_N
    column = tl.arange(0, BLOCK_N)
    key = low + column
    real = real_keys(key, padding, keys)
    k_block = k + low.to(tl.int64) * stride_k
    k_tile = load_tile(k_block, column, stride_k, real, HEAD_SIZE, BLOCK_D)
    dot = products(
        q_tile, k_tile, q_block, q_offset, rows_valid, k_block, stride_k, real, tl.minimum(block, 0), HEAD_SIZE,
        BLOCK_D, True,
    )  # fmt: skip
    key_norm, overflow = key_norms(norm, block, q_norm)
    values_bad = (tl.load(value + block) == INF).to(tl.int32)
    dot, some = decide(
        dot, visible_keys(key, first, last, padding, keys), limit, (q_norm * (HEAD_SIZE * BAND) * key_norm)[:, None],
        overflow, values_bad, q_block, q_offset, rows_valid, k_block, stride_k, v + low.to(tl.int64) * stride_v,
        stride_v, key < keys, threshold, threshold_value, threshold_rest, flat_row, scale, scale_rest, HEAD_SIZE,
        BLOCK_D, CHUNK,
    )  # fmt: skip
    return k_tile, dot, some


@triton.jit
def may_keep(
    block,
    q_norm,
    limit,
    first,
    last,
    padding,
    norm,
    q_block,
    q_offset,
    rows_valid,
    k,
    stride_k,
    keys,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Whether any query may keep a key of the block: 0 or 1. 0 is certain, rounding included.

    Queries are read again, a piece at a time: held in registers for this rare loop they would crowd out the usual one.
    """
    PIECE: tl.constexpr = min(BLOCK_D, 32)
    low = block * BLOCK_N
    column = tl.arange(0, BLOCK_N)
    valid = low + column < keys
    k_block = k + low.to(tl.int64) * stride_k
    dot = tl.zeros((limit.shape[0], BLOCK_N), dtype=tl.float32)
    for start in range(0, BLOCK_D + tl.minimum(block, 0), PIECE):  # + 0, which the compiler does not know: no unrolling
        channel = start + tl.arange(0, PIECE)
        inside = (channel < HEAD_SIZE)[None, :]
        q_piece = tl.load(q_block + q_offset[:, None] + channel[None, :], rows_valid[:, None] & inside, 0.0)
        k_piece = tl.load(k_block + column[:, None] * stride_k + channel[None, :], valid[:, None] & inside, 0.0)
        dot = multiply(q_piece, tl.trans(k_piece), dot)
    key_norm, overflow = key_norms(norm, block, q_norm)
    dot = tl.where(visible_keys(low + column, first, last, padding, keys), dot, -INF)
    below = tl.max(dot, 1) + q_norm * (HEAD_SIZE * BAND) * key_norm < limit
    return 1 - tl.min(below.to(tl.int32), 0) * (1 - overflow)


@triton.jit
def load_values(
    block, v, stride_v, padding, keys, value, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr
):
    """[N, D] values of a key block, 0 in place of what is not finite: rows that keep such a key are NaN already."""
    low = block * BLOCK_N
    column = tl.arange(0, BLOCK_N)
    real = real_keys(low + column, padding, keys)
    tile = load_tile(v + low.to(tl.int64) * stride_v, column, stride_v, real, HEAD_SIZE, BLOCK_D)
    if tl.load(value + block) == INF:
        tile = without_non_finite(tile)
    return tile


@triton.jit
def is_kept(dot, limit):
    return ~(dot <= limit[:, None])


@triton.jit
def is_visible(dot):
    return dot != -INF


@triton.jit
def recheck(
    dot,
    limit,
    band,
    q_block,
    q_offset,
    rows_valid,
    k_block,
    stride_k,
    threshold,
    threshold_value,
    threshold_rest,
    flat_row,
    scale,
    scale_rest,
    HEAD_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Products within rounding of the limit, moved to the side of it where their fp64 sums lie."""
    if threshold is None:
        score = tl.zeros_like(flat_row).to(tl.float64) + threshold_value + threshold_rest
    else:
        score = tl.load(threshold + flat_row, mask=rows_valid, other=0.0).to(tl.float64)
    q_rows = q_block + q_offset
    column = tl.arange(0, dot.shape[1])
    just_above = limit + tl.maximum(tl.abs(limit) * 2.0**-22, 1e-36)
    near = (tl.abs(dot - limit[:, None]) <= band) & is_visible(dot)
    pick = tl.max(tl.where(near, column[None, :], -1), 1)  # [M]
    while tl.max(pick, 0) >= 0:  # one product of every row per round, from the right; there is seldom a second
        wanted = (pick >= 0) & rows_valid
        exact = tl.zeros_like(score)
        for start in range(0, HEAD_SIZE + tl.minimum(tl.max(pick, 0), 0), CHUNK):  # + 0: not to be unrolled
            channel = start + tl.arange(0, CHUNK)
            inside = wanted[:, None] & (channel < HEAD_SIZE)[None, :]
            a = tl.load(q_rows[:, None] + channel[None, :], mask=inside, other=0.0).to(tl.float64)
            b = tl.load(k_block + (pick * stride_k)[:, None] + channel[None, :], mask=inside, other=0.0)
            terms = a * b.to(tl.float64)
            if INTERPRETED:  # all channels at once for speed, and still in order
                exact += tl.sum(tl.where(channel[None, :] == start + CHUNK - 1, tl.cumsum(terms, 1), 0.0), 1)
            else:
                exact += tl.sum(terms, 1)
        above = exact * (tl.zeros_like(exact) + scale + scale_rest) > score
        moved = tl.where(above[:, None], tl.maximum(dot, just_above[:, None]), tl.minimum(dot, limit[:, None]))
        dot = tl.where(column[None, :] == pick[:, None], moved, dot)
        near = (tl.abs(dot - limit[:, None]) <= band) & is_visible(dot) & (column[None, :] < pick[:, None])
        pick = tl.max(tl.where(near, column[None, :], -1), 1)
    return dot


@triton.jit
def kept_nearer(keep, N: tl.constexpr, BY_TRIANGLE: tl.constexpr):
    """[M, N] fp32: kept keys of the tile that lie right of each key. Exact: sums of 0 and 1 in fp32."""
    if BY_TRIANGLE:
        index = tl.arange(0, N)
        triangle = (index[:, None] > index[None, :]).to(tl.float16)
        return multiply(keep.to(tl.float16), triangle, tl.zeros(keep.shape, dtype=tl.float32))
    return tl.cumsum(keep.to(tl.float32), 1, reverse=True) - keep.to(tl.float32)


@triton.jit
def mix(x):
    """dropout.mix on uint32."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def dropout_keys(seed, head, position):
    """dropout.row_keys: [M] uint32. head: batch * Hq + head, a scalar or [M]."""
    bits = tl.load(seed).to(tl.uint64, bitcast=True)
    low = (bits & 0xFFFFFFFF).to(tl.uint32)
    high = (bits >> 32).to(tl.uint32)
    head_key = mix(mix(mix(low) ^ high) ^ head.to(tl.uint32))
    return mix(head_key ^ position.to(tl.uint32))


@triton.jit
def survivors(row_keys, key, limit):
    """bool [M, N]: dropout.survivors. limit: the bits of a uint32."""
    step = tl.full((1,), 0x9E3779B9, tl.uint32)
    hashed = mix(row_keys[:, None] + (key.to(tl.uint32) * step)[None, :])
    return hashed >= limit.to(tl.uint32, bitcast=True)


@triton.jit
def inverse_gap(decay):
    """An upper bound of 1 / (1 - e^g) for g <= 0: inf at 0. 1 - e^-x >= x - x^2/2 where that is close to it."""
    x = -decay
    gap = tl.where(x < 0.1, x * (1.0 - 0.5 * x), (1.0 - tl.exp2(decay * LOG2E)) * 0.99999)
    return 1.00001 / gap


@triton.jit
def rest_is_small(
    upper,  # [M] bound of the unread scores, base 2
    decay,  # [M] base 2
    kept,  # [M] fp32
    remaining,  # [M] keys not yet read, fp32
    log_total,  # [M] log2 of the weight read so far
    inverse,  # [M] inverse_gap
    log_tolerance,  # NaN: never
    steepest,  # 1/(4w) of a surrogate
    NEEDS_GRAD: tl.constexpr,
    SURROGATE: tl.constexpr,
):
    """bounds.finished in base 2, without its `remaining <= 0`."""
    if SURROGATE:
        factor = remaining * (kept + remaining + steepest)
    elif NEEDS_GRAD:
        factor = tl.minimum((kept + inverse) * inverse, remaining * (kept + remaining))
    else:
        factor = tl.minimum(inverse, remaining)
    tail = upper + decay * kept + tl.log2(factor)
    return (kept > 0) & (tail <= log_tolerance + log_total)
