"""The public functions: build the problem, send it to a backend."""

from __future__ import annotations

from typing import NamedTuple, Unpack

import torch
from torch import Tensor
from torch.autograd import forward_ad

from traformer.errors import InputError
from traformer.ops.threshold_relative import reference
from traformer.ops.threshold_relative.backends import BACKENDS, choose_backend
from traformer.ops.threshold_relative.options import AttentionOptions, KeyOptions, WalkOptions, make_problem
from traformer.ops.threshold_relative.problem import Problem
from traformer.ops.threshold_relative.registration import run_forward, run_output


class AttentionMap(NamedTuple):
    """Everything that one attention call decides, written out; each [B, Hq, Tq, Tk]."""

    scores: Tensor
    keep: Tensor  # bool
    distance: Tensor  # kept keys in [j .. i]; 0 where not kept
    weights: Tensor


class AttentionStats(NamedTuple):
    """What a fused call did, per query; each int32 [B, Hq, Tq]."""

    read: Tensor  # keys whose score was computed
    kept: Tensor  # of those, keys above the threshold


def threshold_relative_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    backend: str = "auto",
    **options: Unpack[AttentionOptions],
) -> Tensor:
    """Attention over the keys whose score is above the threshold, at distances that count only those keys.

    q [B, Hq, Tq, D]; k, v [B, Hkv, Tk, D], query head h reads key head h // (Hq // Hkv); log_decay [B, Hq, Tq] <= 0
    and finite belongs to the query. q and k come already normed. Returns [B, Hq, Tq, D]; a query that keeps no key gets
    zeros. What is not finite makes the rows NaN that see it (docs/kernel.md).

    scale           default 1/sqrt(D)
    threshold       float >= 0 (default 0), or [B, Hq, Tq]; no gradient flows to it but that of a surrogate
    exclude_self    bool, or bool [Hq]: a query does not see its own key
    dropout_p       on the weights, after the softmax
    dropout_seed    int or 0-dim int64: fixes the mask; by default torch's generator draws one
    key_padding_mask  bool [B, Tk], True = real key; padded keys are neither kept nor counted
    cu_seqlens      int [n+1]: packed sequences, batch 1; a query sees its own sequence only
    query_start     position of the first query on the key axis, default Tk - Tq; later keys are never read
    score_bound     an upper bound of every score, if you know one (float or [Hq]; sqrt(D) after QK-norm): a promise,
                    not checked; else computed from norms
    key_index       a KeyIndex kept along with a cache, so that decoding need not pass over old keys
    tolerance       share of a row's weight that the early exit may drop, default 2^-24; 0 reads every key
    surrogate_width  w > 0: the result is the same, but its gradient is as if each key's weight were also multiplied by
                    sigmoid((s - threshold) / w), so that removed keys and the threshold learn (straight-through)
    backend         "auto", "reference", "blockwise", "cpu", "triton". float64 runs on "reference" and "blockwise";
                    second derivatives, torch.func transforms and forward mode on "reference", which "auto" takes there
    """
    problem = make_problem(q, k, v, log_decay, options)
    if forward_ad._current_level >= 0 and options.get("surrogate_width") is not None:
        raise InputError("surrogate_width is a rule for gradients: it has no forward-mode derivative; leave it out")
    chosen = _choose(backend, problem)
    if problem.key_low is not None and chosen not in ("cpu", "triton"):
        raise InputError(f"key_index needs the backend 'cpu' or 'triton', not {chosen!r}; leave it out")
    if not BACKENDS[chosen].fused:
        return reference.forward(problem)
    return run_output(chosen, problem)


def attention_map(q: Tensor, k: Tensor, log_decay: Tensor, **options: Unpack[KeyOptions]) -> AttentionMap:
    """Scores, keep mask, contextual distances and weights as full matrices: for looking at, quadratic in memory.

    Arguments as in threshold_relative_attention, from scale to query_start.
    """
    return AttentionMap(*reference.attention_map(make_problem(q, k, k, log_decay, options, KeyOptions)))


def attention_stats(
    q: Tensor,
    k: Tensor,
    log_decay: Tensor,
    *,
    needs_grad: bool = False,
    backend: str = "auto",
    **options: Unpack[WalkOptions],
) -> AttentionStats:
    """Keys read and kept by each query when this problem is run (needs_grad: as in training).

    Arguments as in threshold_relative_attention.
    """
    problem = make_problem(q, k, k, log_decay, options, WalkOptions, needs_grad)
    chosen = choose_backend(backend, q.device, q.dtype, q.shape[3])
    if not BACKENDS[chosen].fused:
        raise InputError(f"attention_stats describes a fused backend; backend {chosen!r} always reads every key")
    with torch.no_grad():
        result = run_forward(chosen, problem)
    position = problem.query_start + torch.arange(q.shape[2], device=q.device, dtype=torch.int32)
    return AttentionStats((position + 1 - result.reach).clamp(min=0), result.kept)


def _choose(backend: str, problem: Problem) -> str:
    """The backend that runs: under a torch.func transform, or in forward mode, one of plain torch."""
    q = problem.q
    if not torch.compiler.is_compiling() and _is_transformed():
        if backend == "auto":
            return "reference"
        chosen = choose_backend(backend, q.device, q.dtype, q.shape[3])
        if BACKENDS[chosen].fused:
            raise InputError(
                f"backend {backend!r} takes no part in torch.func transforms and forward-mode derivatives; "
                "use backend='reference' or 'auto'"
            )
        return chosen
    return choose_backend(backend, q.device, q.dtype, q.shape[3])


def _is_transformed() -> bool:
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
