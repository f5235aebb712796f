"""The mechanism as its formula: eager, quadratic, differentiable, any float type. Its fp64 run is the oracle.

What is not finite follows one law in every backend:
- A row that sees a non-finite key, keeps a non-finite value, or has a non-finite query or decay (and keeps a key) is
  NaN, and so are its dq, dlog_decay and dthreshold, dv of the keys that it keeps, and dk of the keys that it keeps
  (with a surrogate: sees). Nothing else is touched.
- A non-finite value that a row removes does not touch the row's output. With a surrogate the gradient of that choice
  reads the value: dq and dthreshold of the row and dk of that key are NaN, nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from traformer.ops.threshold_relative.decision import decide
from traformer.ops.threshold_relative.dropout import row_keys, survivors
from traformer.ops.threshold_relative.options import check_values
from traformer.ops.threshold_relative.problem import Problem


class _Substitute(torch.autograd.Function):
    """Exchanges elements on the way forward and passes every gradient back as if nothing had been exchanged."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, where: Tensor, value: float) -> Tensor:
        return torch.where(where, value, x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


class _SubstituteInForwardMode(_Substitute):
    """A class of its own, since torch.compile refuses functions that have a jvp."""

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return tangent.clone()  # torch asks for a tensor of its own


def substitute(x: Tensor, where: Tensor, value: float) -> Tensor:
    """x with `value` where `where` is True, x's own gradient everywhere. `where` has the shape of x."""
    function = _Substitute if forward_ad._current_level < 0 else _SubstituteInForwardMode
    result: Tensor = function.apply(x, where, value)  # type: ignore[no-untyped-call]
    return result


def visibility(problem: Problem) -> Tensor:
    """bool [B or 1, Hq or 1, Tq, Tk]: which keys a query may see at all (causal, packing, padding, own key)."""
    query_count, key_count = problem.q.shape[2], problem.k.shape[2]
    device = problem.q.device
    position = problem.query_start + torch.arange(query_count, device=device)  # [Tq]
    key = torch.arange(key_count, device=device)  # [Tk]
    visible = key <= position[:, None]  # [Tq, Tk]
    if problem.first_key is not None:
        visible = visible & (key >= problem.first_key[:, None])
    visible = visible[None, None]
    if problem.key_padding_mask is not None:
        visible = visible & problem.key_padding_mask[:, None, None, :]
    if problem.exclude_self is not None:
        own = key == position[:, None]
        visible = visible & ~(own & problem.exclude_self[None, :, None, None])
    return visible


@torch.library.custom_op("traformer::keep_mask", mutates_args=())
def keep_mask(
    scores: Tensor,
    q: Tensor,
    k: Tensor,
    log_decay: Tensor,
    threshold: Tensor | None,
    threshold_value: float,
    scale: float,
    visible: Tensor,
) -> Tensor:
    """The canonical decision, and the checks of values, as one operator: a traced graph cannot look at values."""
    check_values(log_decay, threshold)
    return decide(scores, q, k, scale, threshold_value if threshold is None else threshold, visible)


@keep_mask.register_fake
def _(scores: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(scores, dtype=torch.bool)


@keep_mask.register_vmap
def _(info: Any, dims: tuple[int | None, ...], *values: Any) -> tuple[Tensor, int]:
    """One more leading dimension: `decide` takes any number of them."""
    moved = [
        value if not isinstance(value, Tensor) else value.movedim(dim, 0) if dim is not None else value[None]
        for value, dim in zip(values, dims, strict=True)
    ]
    full = [x.expand(info.batch_size, *x.shape[1:]) if isinstance(x, Tensor) else x for x in moved]
    return keep_mask(*full), 0


def attention_map(problem: Problem) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """scores, keep, distance, weights, each [B, Hq, Tq, Tk]; distance is 0 where a key is not kept."""
    dtype = problem.compute_dtype
    group = problem.heads_per_key_head
    q = problem.q.to(dtype)
    k = problem.k.to(dtype).repeat_interleave(group, dim=1)  # [B, Hq, Tk, D]
    v = problem.v.repeat_interleave(group, dim=1)
    decay = problem.log_decay.to(dtype).unsqueeze(-1)  # [B, Hq, Tq, 1]

    # What a row may not see cannot touch it, not even a NaN times a weight of 0: non-finite inputs are taken out here
    # and put back below as NaN scores in exactly the rows that see them.
    bad_row = ~problem.q.isfinite().all(-1, keepdim=True)  # [B, Hq, Tq, 1]
    bad_key = ~k.isfinite().all(-1).unsqueeze(-2)  # [B, Hq, 1, Tk]
    bad_value = ~v.isfinite().all(-1).unsqueeze(-2)
    q = substitute(q, ~q.isfinite(), 0.0)
    k = substitute(k, ~k.isfinite(), 0.0)

    visible = visibility(problem).expand(q.shape[0], q.shape[1], -1, -1)
    scores = (q @ k.transpose(-1, -2)) * problem.scale  # [B, Hq, Tq, Tk]
    bad = visible & (bad_row | bad_key | ~scores.isfinite())
    keep = torch.ops.traformer.keep_mask(
        scores.detach(),
        q.detach(),
        k.detach(),
        problem.log_decay.detach(),
        None if problem.threshold is None else problem.threshold.detach(),
        problem.threshold_value,
        problem.scale,
        visible,
    )
    keep = keep | bad
    poisoned = bad.any(-1, keepdim=True) | (keep & bad_value).any(-1, keepdim=True)  # [B, Hq, Tq, 1]
    scores = substitute(scores, poisoned & keep, torch.nan)

    distance = keep.flip(-1).cumsum(-1).flip(-1) * keep  # kept keys in [j .. i]
    logits = torch.where(keep, scores + decay * (distance - 1), -torch.inf)
    peak = logits.detach().amax(-1, keepdim=True) if logits.shape[-1] else logits.new_zeros(*logits.shape[:-1], 1)
    peak = torch.where(peak == -torch.inf, 0, peak)  # rows that keep nothing
    weights = torch.where(keep, torch.exp(logits - peak), 0)
    if problem.surrogate_width:
        weights = weights + surrogate_gradient(problem, scores, visible, keep, bad_value, decay, peak)
    total = weights.sum(-1, keepdim=True)
    # The total of a NaN row is NaN: the keys that it removes still weigh 0.
    weights = torch.where(keep | peak.isfinite(), weights / torch.where(total == 0, 1, total), 0)
    return scores, keep, distance, weights


def surrogate_gradient(
    problem: Problem, scores: Tensor, visible: Tensor, keep: Tensor, bad_value: Tensor, decay: Tensor, peak: Tensor
) -> Tensor:
    """0 everywhere, with the gradient of the softened choice: each key's weight, were it kept, times a sigmoid's."""
    threshold = problem.threshold_value if problem.threshold is None else problem.threshold.unsqueeze(-1)
    soft = torch.sigmoid((scores - threshold) / problem.surrogate_width)
    nearer = keep.flip(-1).cumsum(-1).flip(-1) - keep.to(torch.int64)  # kept keys right of j: c - 1, were it kept
    if_kept = torch.exp(scores.detach() + decay.detach() * nearer - peak)
    seen = visible & keep.any(-1, keepdim=True)  # a row that keeps nothing has no gradient, as without a surrogate
    unknown = seen & ~keep & bad_value  # what a removed key would have given is not a number
    mass = torch.where(unknown, torch.nan, torch.where(seen, if_kept, 0))
    return substitute(torch.where(seen, mass * (soft - soft.detach()), 0), unknown, 0.0)


def forward(problem: Problem) -> Tensor:
    """out [B, Hq, Tq, D] in the dtype of q."""
    _, _, _, weights = attention_map(problem)
    if problem.dropout_p > 0.0:
        weights = weights * dropout_factors(problem, weights)
    v = problem.v.to(weights.dtype).repeat_interleave(problem.heads_per_key_head, dim=1)
    # A row that keeps a value that is not finite is NaN already; one that removes it must not multiply it by 0.
    bad_value = ~v.isfinite().all(-1, keepdim=True)
    return (weights @ substitute(v, bad_value.expand_as(v), 0.0)).to(problem.q.dtype)


def dropout_factors(problem: Problem, weights: Tensor) -> Tensor:
    """0 where a weight is dropped, else 1/(1-p)."""
    batch, heads, query_count, key_count = weights.shape
    device = weights.device
    head = torch.arange(batch * heads, device=device).view(batch, heads, 1)
    position = problem.query_start + torch.arange(query_count, device=device)
    assert problem.dropout_seed is not None
    keys = row_keys(problem.dropout_seed, head, position).unsqueeze(-1)  # [B, Hq, Tq, 1]
    alive = survivors(keys, torch.arange(key_count, device=device), problem.dropout_p)
    return alive.to(weights.dtype) / (1.0 - problem.dropout_p)
