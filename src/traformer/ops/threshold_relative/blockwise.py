"""The walk from the diagonal to the left in plain torch, on any device: memory O(T), early exit, a backward of its own.

The unit of work is an item: one block of ROWS queries of one (batch, head). All items of a chunk take their n-th key
block to the left in one batched product; items whose rows are all finished leave the chunk. So the number of steps is
that of the longest walk, and the work is that of all walks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from traformer.ops.threshold_relative.bounds import finished
from traformer.ops.threshold_relative.decision import decide
from traformer.ops.threshold_relative.dropout import row_keys, survivors
from traformer.ops.threshold_relative.options import check_values
from traformer.ops.threshold_relative.problem import Forward, Gradients, Problem, Saved, empty_forward, empty_gradients

ROWS = 64  # queries of an item
KEYS = 64  # keys of a step
CHUNK_ELEMENTS = 1 << 22  # scores held at a time: bounds the workspace whatever the length

# A bound computed from norms is itself rounded; this keeps it on the safe side.
_BOUND_SLACK = 1.0 + 2.0**-18


@dataclass
class Tile:
    """One key block for each item of a chunk."""

    key: Tensor  # [N, C] absolute key positions, may be < 0 or beyond the end where invisible
    k: Tensor  # [N, C, D]
    v: Tensor  # [N, C, D]
    scores: Tensor  # [N, R, C]
    keep: Tensor  # bool [N, R, C]
    bad: Tensor | None  # bool [N, R]: the row met something non-finite in this tile
    farther: Tensor  # [N, R, C]: c - 1, kept keys nearer than this one
    visible: Tensor  # bool [N, R, C]
    bad_value: Tensor | None  # bool [N, C]: the key's value is not finite (and 0 in v)


class Rows:
    """The query side of a chunk of items: gathered once, shrunk as items finish."""

    def __init__(self, walk: Walk, items: Tensor):
        problem = walk.problem
        heads, row_blocks = problem.q.shape[1], walk.row_blocks
        self.walk = walk
        self.batch = items // (heads * row_blocks)  # [N]
        self.head = items // row_blocks % heads
        self.key_head = self.head // problem.heads_per_key_head
        row = (items % row_blocks)[:, None] * ROWS + torch.arange(ROWS, device=items.device)  # [N, R]
        self.real = row < problem.q.shape[2]
        self.row = row.clamp(max=problem.q.shape[2] - 1)
        self.position = problem.query_start + self.row
        index = (self.batch[:, None], self.head[:, None], self.row)
        self.index = index
        q = problem.q[index].to(problem.compute_dtype)  # [N, R, D]
        self.bad = None
        if walk.suspicious:
            finite = q.isfinite()
            self.bad = ~finite.all(-1)
            q = torch.where(finite, q, 0)
        self.q = q
        self.decay = problem.log_decay[index].to(problem.compute_dtype)  # [N, R]
        self.threshold = problem.threshold_value if problem.threshold is None else problem.threshold[index]
        self.exclude_self = None if problem.exclude_self is None else problem.exclude_self[self.head]  # [N]
        first = torch.zeros_like(self.row) if problem.first_key is None else problem.first_key[self.row].long()
        if walk.first_real is not None:
            first = torch.maximum(first, walk.first_real[self.batch][:, None])
        self.first = first  # leftmost key that the row may see
        self.block = torch.where(self.real, self.position, -1).amax(-1) // KEYS  # [N] next key block to read
        self.keys = None
        if problem.dropout_p > 0.0:
            assert problem.dropout_seed is not None
            head = self.batch[:, None] * heads + self.head[:, None]
            self.keys = row_keys(problem.dropout_seed, head, self.position).unsqueeze(-1)  # [N, R, 1]
        self.bound = None if problem.score_bound is None else problem.score_bound[self.head].to(q.dtype)[:, None]
        self.norm = None if self.bound is not None else q.norm(dim=-1)

    def select(self, active: Tensor) -> None:
        """Keep only these items."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value[active])
        self.index = (self.batch[:, None], self.head[:, None], self.row)

    def upper_bound(self, edge: Tensor) -> Tensor:
        """U for the keys left of `edge` [N]: the caller's, or |q| times the largest remaining |k|."""
        if self.bound is not None:
            return self.bound
        assert self.norm is not None and self.walk.norm_maxima is not None
        largest = self.walk.norm_maxima[self.batch, self.key_head, (edge - 1).clamp(min=0)]  # [N]
        bound: Tensor = self.norm * largest[:, None] * (abs(self.walk.problem.scale) * _BOUND_SLACK)
        return bound

    def alive(self, tile: Tile) -> Tensor:
        """Dropout factors of a tile: 0 or 1/(1-p)."""
        assert self.keys is not None
        p = self.walk.problem.dropout_p
        return survivors(self.keys, tile.key.unsqueeze(1), p).to(tile.scores.dtype) / (1.0 - p)

    def read(self, carried: Tensor) -> Tile:
        """The tile at self.block, keep decisions and counts included. carried [N, R]: kept keys so far."""
        problem = self.walk.problem
        key = self.block[:, None] * KEYS + torch.arange(KEYS, device=self.block.device)  # [N, C]
        column = key.clamp(min=0, max=problem.k.shape[2] - 1)
        index = (self.batch[:, None], self.key_head[:, None], column)
        k = problem.k[index].to(self.q.dtype)  # [N, C, D]
        v = problem.v[index].to(self.q.dtype)
        visible = (key[:, None] <= self.position[..., None]) & (key[:, None] >= self.first[..., None])
        visible &= self.real[..., None]  # [N, R, C]
        if problem.key_padding_mask is not None:
            visible &= problem.key_padding_mask[self.batch[:, None], column][:, None]
        if self.exclude_self is not None:
            own = key[:, None] == self.position[..., None]
            visible &= ~(own & self.exclude_self[:, None, None])
        bad_key = bad_value = None
        if self.walk.suspicious:
            finite = k.isfinite()
            bad_key = ~finite.all(-1)
            k = torch.where(finite, k, 0)
            bad_value = ~v.isfinite().all(-1)
            v = v.masked_fill(bad_value[..., None], 0)
        scores = torch.bmm(self.q, k.transpose(1, 2)).mul_(problem.scale)  # [N, R, C]
        keep = decide(scores, self.q, k, problem.scale, self.threshold, visible)
        bad = None
        if bad_key is not None and bad_value is not None and self.bad is not None:
            broken = visible & (self.bad[..., None] | bad_key[:, None] | ~scores.isfinite())
            keep = keep | broken
            bad = (broken | (keep & bad_value[:, None])).any(-1)
        upto = keep.cumsum(-1)  # kept in [block start .. j]
        farther = (carried + upto[..., -1]).unsqueeze(-1) - upto
        return Tile(key, k, v, scores, keep, bad, farther, visible, bad_value)


class Walk:
    """What all chunks of one problem share."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self.row_blocks = math.ceil(problem.q.shape[2] / ROWS)
        parts = (problem.q, problem.k, problem.v)
        self.suspicious = not all(bool(part.isfinite().all()) for part in parts)
        self.first_real = None
        if problem.key_padding_mask is not None:
            real = problem.key_padding_mask
            self.first_real = torch.where(real.any(-1), real.int().argmax(-1), real.shape[-1])  # [B]
        self.norm_maxima = None
        if problem.score_bound is None and problem.tolerance > 0.0:
            norms = problem.k.to(problem.compute_dtype).norm(dim=-1)  # [B, Hkv, Tk]
            self.norm_maxima = torch.cummax(norms.nan_to_num(torch.inf, torch.inf, torch.inf), dim=-1).values

    def chunks(self) -> list[Tensor]:
        items = self.problem.q.shape[0] * self.problem.q.shape[1] * self.row_blocks
        size = max(1, CHUNK_ELEMENTS // (ROWS * max(KEYS, self.problem.q.shape[3])))
        return list(torch.arange(items, device=self.problem.q.device).split(size))


def unavailable_reason() -> None:
    """It runs everywhere."""


def unsupported_reason(dtype: torch.dtype, head_size: int) -> None:
    """It takes every type and head size."""


def output(problem: Problem) -> Tensor:
    return forward(problem).out


def forward(problem: Problem) -> Forward:
    check_values(problem.log_decay, problem.threshold)
    result = empty_forward(problem)
    if 0 in problem.q.shape or problem.k.shape[2] == 0:
        result.out.zero_()
        result.normaliser.fill_(torch.inf)
        result.reach.zero_()
        result.kept.zero_()
        return result
    walk = Walk(problem)
    for items in walk.chunks():
        _forward_chunk(walk, items, result)
    return result


def _forward_chunk(walk: Walk, items: Tensor, result: Forward) -> None:
    problem = walk.problem
    rows = Rows(walk, items)
    q = rows.q
    carried = torch.zeros(q.shape[:2], dtype=torch.int64, device=q.device)  # kept keys so far
    peak = torch.full(q.shape[:2], -torch.inf, dtype=q.dtype, device=q.device)
    total = torch.zeros_like(peak)  # sum of exp(logit - peak)
    poisoned = torch.zeros_like(carried, dtype=torch.bool)
    sums = torch.zeros_like(q)  # [N, R, D]
    log_tolerance = math.log(problem.tolerance) if problem.tolerance > 0.0 else -math.inf

    while rows.block.numel():
        tile = rows.read(carried)
        logits = tile.scores + rows.decay[..., None] * tile.farther
        logits = torch.where(tile.keep, logits, -torch.inf)
        higher = torch.maximum(peak, logits.amax(-1))
        shift = torch.where(higher == -torch.inf, 0, higher)
        weights = torch.exp(logits - shift[..., None])
        rescale = torch.exp(peak - shift)
        total = total * rescale + weights.sum(-1)
        if problem.dropout_p > 0.0:
            weights = weights * rows.alive(tile)
        sums = sums * rescale[..., None] + torch.bmm(weights, tile.v)
        peak = higher
        carried = carried + tile.keep.sum(-1)
        if tile.bad is not None:
            poisoned = poisoned | tile.bad

        edge = rows.block * KEYS  # [N]: keys left of it are unread
        remaining = edge[:, None] - rows.first  # [N, R]
        done = remaining <= 0
        if problem.tolerance > 0.0:
            upper = rows.upper_bound(edge)
            log_total = peak + torch.log(total)
            done = finished(
                upper, rows.decay, carried, remaining, log_total, log_tolerance, problem.needs_grad,
                problem.surrogate_width, rows.threshold,
            )  # fmt: skip
        done = (done | ~rows.real).all(-1)  # [N]
        if bool(done.any()):
            _store(rows, done, sums, total, peak, carried, poisoned, result)
            active = ~done
            rows.select(active)
            carried, peak, total, poisoned, sums = (x[active] for x in (carried, peak, total, poisoned, sums))
        rows.block = rows.block - 1


def _store(
    rows: Rows,
    done: Tensor,
    sums: Tensor,
    total: Tensor,
    peak: Tensor,
    carried: Tensor,
    poisoned: Tensor,
    result: Forward,
) -> None:
    real = rows.real & done[:, None]
    where = tuple(part.expand_as(real)[real] for part in rows.index)
    total, empty = total[real], carried[real] == 0
    value = sums[real] / torch.where(empty, 1, total)[:, None]
    log_sum = torch.where(empty, torch.inf, peak[real] + torch.log(total))
    bad = poisoned[real]
    result.out[where] = torch.where(bad[:, None], torch.nan, value).to(result.out.dtype)
    result.normaliser[where] = torch.where(bad, torch.nan, log_sum)
    low = (rows.block * KEYS)[:, None].expand_as(real)[real].clamp(min=0)
    result.reach[where] = torch.minimum(low, rows.position[real] + 1).to(torch.int32)
    result.kept[where] = carried[real].to(torch.int32)


def backward(problem: Problem, grad_out: Tensor, saved: Saved) -> Gradients:
    """The tiles of the forward walk, recomputed."""
    gradients = empty_gradients(problem)
    for x in gradients:
        x.zero_()
    # Keys collect from many rows: in the compute type whatever the storage type.
    dk_sum = torch.zeros(problem.k.shape, dtype=problem.compute_dtype, device=problem.k.device)
    dv_sum = torch.zeros_like(dk_sum)
    if 0 not in problem.q.shape and problem.k.shape[2]:
        walk = Walk(problem)
        for items in walk.chunks():
            _backward_chunk(walk, items, grad_out, saved, gradients, dk_sum, dv_sum)
    gradients.k.copy_(dk_sum)
    gradients.v.copy_(dv_sum)
    return gradients


def _backward_chunk(
    walk: Walk, items: Tensor, grad_out: Tensor, saved: Saved, gradients: Gradients, dk_sum: Tensor, dv_sum: Tensor
) -> None:
    problem = walk.problem
    rows = Rows(walk, items)
    dtype = rows.q.dtype
    real = rows.real
    where = tuple(part.expand_as(real)[real] for part in rows.index)  # rows leave the chunk as it walks
    grad = grad_out[rows.index].to(dtype)  # [N, R, D]
    log_sum = saved.normaliser[rows.index].to(dtype)  # [N, R]
    delta = (grad * saved.out[rows.index].to(dtype)).sum(-1)
    # A row that is not finite gives NaN to the keys it keeps (with a surrogate: sees) and leaves the others alone.
    broken = ~(grad.isfinite().all(-1) & delta.isfinite()) | log_sum.isnan()
    log_sum = torch.where(broken, torch.nan, log_sum)
    grad = torch.where(broken[..., None], 0, grad)
    delta = torch.where(broken, 0, delta)
    last = torch.where(real, saved.reach[rows.index], problem.k.shape[2]).amin(-1) // KEYS  # [N] leftmost block to read
    dq_sum = torch.zeros_like(rows.q)
    ddecay_sum = torch.zeros_like(log_sum)
    dthreshold_sum = torch.zeros_like(log_sum)
    width = problem.surrogate_width
    carried = torch.zeros(log_sum.shape, dtype=torch.int64, device=log_sum.device)
    slot = torch.arange(rows.block.numel(), device=rows.block.device)  # where an item's sums live
    key_heads, key_count, channels = problem.k.shape[1], problem.k.shape[2], problem.k.shape[3]

    while rows.block.numel():
        tile = rows.read(carried)
        logits = tile.scores + rows.decay[..., None] * tile.farther - log_sum[..., None]
        if_kept = torch.exp(logits)
        weights = torch.where(tile.keep, if_kept, 0)
        dweights = torch.bmm(grad, tile.v.transpose(1, 2))  # [N, R, C]
        applied = weights
        if problem.dropout_p > 0.0:
            alive = rows.alive(tile)
            applied = weights * alive
            dweights = dweights * alive
        dscores = torch.where(tile.keep, weights * (dweights - delta[..., None]), 0)
        ddecay_sum.index_add_(0, slot, (dscores * tile.farther).sum(-1))
        if width:  # the choice itself, differentiated as if it were soft
            threshold = rows.threshold if isinstance(rows.threshold, float) else rows.threshold[..., None]
            soft = torch.sigmoid((tile.scores - threshold) / width)
            pull = if_kept * (dweights - delta[..., None]) * soft * (1 - soft) / width
            if tile.bad_value is not None:  # what a removed key would have given is not a number
                pull = torch.where(tile.bad_value[:, None] & ~tile.keep, torch.nan, pull)
            pull = torch.where(tile.visible & (log_sum != torch.inf)[..., None], pull, 0)  # inf: keeps nothing
            dthreshold_sum.index_add_(0, slot, -pull.sum(-1))
            dscores = dscores + pull
        dq_sum.index_add_(0, slot, torch.bmm(dscores, tile.k).mul_(problem.scale))
        column = tile.key.clamp(min=0, max=key_count - 1)
        flat = ((rows.batch * key_heads + rows.key_head)[:, None] * key_count + column).reshape(-1)
        dk_tile = torch.bmm(dscores.transpose(1, 2), rows.q).mul_(problem.scale)
        dk_sum.view(-1, channels).index_add_(0, flat, dk_tile.reshape(-1, channels))
        dv_tile = torch.bmm(applied.transpose(1, 2), grad)
        dv_sum.view(-1, channels).index_add_(0, flat, dv_tile.reshape(-1, channels))
        carried = carried + tile.keep.sum(-1)

        active = rows.block > last
        if not bool(active.all()):
            rows.select(active)
            carried, log_sum, grad, delta, last, slot = (x[active] for x in (carried, log_sum, grad, delta, last, slot))
        rows.block = rows.block - 1

    gradients.q[where] = dq_sum[real].to(gradients.q.dtype)
    gradients.log_decay[where] = ddecay_sum[real].to(gradients.log_decay.dtype)
    if width:
        gradients.threshold[where] = dthreshold_sum[real].to(gradients.threshold.dtype)
