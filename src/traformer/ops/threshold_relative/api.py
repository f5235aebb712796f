"""The public functions: check the arguments, bring them to normal form, send them to a backend."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from traformer.errors import InputError
from traformer.ops.threshold_relative import reference
from traformer.ops.threshold_relative.backends import choose_backend
from traformer.ops.threshold_relative.problem import Problem
from traformer.ops.threshold_relative.registration import check_values, forward_op

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class AttentionMap(NamedTuple):
    """Everything one attention call decides, written out; each [B, Hq, Tq, Tk]."""

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
    scale: float | None = None,
    threshold: float | Tensor = 0.0,
    exclude_self: bool | Tensor = False,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    query_start: int | None = None,
    score_bound: float | Tensor | None = None,
    key_index: Any = None,
    tolerance: float = 2**-24,
    surrogate_width: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attention over the keys whose score is above the threshold, at distances that count only those keys.

    q [B, Hq, Tq, D]; k, v [B, Hkv, Tk, D], query head h reads key head h // (Hq // Hkv); log_decay [B, Hq, Tq] <= 0
    belongs to the query. q and k come already normed. Returns [B, Hq, Tq, D]; a query that keeps no key gets zeros.

    scale           default 1/sqrt(D)
    threshold       float >= 0, or [B, Hq, Tq]; no gradient flows to it but that of a surrogate
    exclude_self    bool, or bool [Hq]: a query does not see its own key
    dropout_p       on the weights, after the softmax
    dropout_seed    int or 0-dim int64: fixes the mask; by default torch's generator draws one
    key_padding_mask  bool [B, Tk], True = real key; padded keys are neither kept nor counted
    cu_seqlens      int [n+1]: packed sequences, batch 1; a query sees its own sequence only
    query_start     position of the first query on the key axis, default Tk - Tq; later keys are never read
    score_bound     an upper bound of every score, if you know one (float or [Hq]; sqrt(D) after QK-norm): a promise,
                    not checked; else computed from norms
    key_index       a KeyIndex kept along with a cache, so that decoding need not pass over old keys
    tolerance       share of a row's weight that the early exit may drop; 0 reads every key
    surrogate_width  w > 0: the result is the same, but its gradient is as if each key's weight were also multiplied by
                    sigmoid((s - threshold) / w), so that removed keys and the threshold learn (straight-through)
    backend         "auto", "reference", "blockwise", "cpu", "triton"
    """
    _check_tensors(q, k, v, log_decay)
    backend = choose_backend(backend, q.device, q.dtype, q.shape[3])
    options = _options(
        q, k, log_decay, scale, threshold, exclude_self, key_padding_mask, cu_seqlens, query_start, score_bound,
        tolerance, surrogate_width,
    )  # fmt: skip
    if not 0.0 <= dropout_p < 1.0:
        raise InputError(f"dropout_p must be in [0, 1), not {dropout_p}")
    seed = _seed(dropout_seed, q.device) if dropout_p > 0.0 else None
    if key_index is not None and backend != "cpu":
        raise InputError(f"key_index needs the compiled backend 'cpu', not {backend!r}; leave it out")
    if backend == "reference":
        return reference.forward(_reference_problem(q, k, v, log_decay, options, dropout_p, seed))
    return _call(q, k, v, log_decay, options, dropout_p, seed, key_index, backend)[0]


def attention_map(
    q: Tensor,
    k: Tensor,
    log_decay: Tensor,
    *,
    scale: float | None = None,
    threshold: float | Tensor = 0.0,
    exclude_self: bool | Tensor = False,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    query_start: int | None = None,
) -> AttentionMap:
    """Scores, keep mask, contextual distances and weights as full matrices: for looking at, quadratic in memory."""
    _check_tensors(q, k, k, log_decay)
    options = _options(
        q, k, log_decay, scale, threshold, exclude_self, key_padding_mask, cu_seqlens, query_start, None, 0.0
    )
    return AttentionMap(*reference.attention_map(_reference_problem(q, k, k, log_decay, options, 0.0, None)))


def attention_stats(
    q: Tensor,
    k: Tensor,
    log_decay: Tensor,
    *,
    scale: float | None = None,
    threshold: float | Tensor = 0.0,
    exclude_self: bool | Tensor = False,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    query_start: int | None = None,
    score_bound: float | Tensor | None = None,
    key_index: Any = None,
    tolerance: float = 2**-24,
    needs_grad: bool = False,
    backend: str = "auto",
) -> AttentionStats:
    """Keys read and kept by each query when this problem is run (needs_grad: as in training)."""
    _check_tensors(q, k, k, log_decay)
    backend = choose_backend(backend, q.device, q.dtype, q.shape[3])
    if backend == "reference":
        raise InputError("attention_stats describes a fused backend; backend 'reference' always reads every key")
    options = _options(
        q,
        k,
        log_decay,
        scale,
        threshold,
        exclude_self,
        key_padding_mask,
        cu_seqlens,
        query_start,
        score_bound,
        tolerance,
    )
    with torch.no_grad():
        _, _, reach, kept = _call(q, k, k, log_decay, options, 0.0, None, key_index, backend, needs_grad)
    position = options["query_start"] + torch.arange(q.shape[2], device=q.device, dtype=torch.int32)
    return AttentionStats((position + 1 - reach).clamp(min=0), kept)


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    options: dict[str, Any],
    dropout_p: float,
    seed: Tensor | None,
    key_index: Any,
    backend: str,
    needs_grad: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if needs_grad is None:
        learning = (q, k, v, log_decay, *([] if options["threshold"] is None else [options["threshold"]]))
        needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in learning)
    index = (None, None, None) if key_index is None else key_index.tensors(options["query_start"] + q.shape[2])
    return forward_op(
        q, k, v, log_decay, options["threshold"], options["threshold_value"], options["exclude_self"],
        options["key_padding_mask"], options["first_key"], options["query_start"], options["scale"],
        options["score_bound"], dropout_p, seed, options["tolerance"], needs_grad, *index,
        options["surrogate_width"] if needs_grad else 0.0, backend,
    )  # fmt: skip


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> None:
    named = {"q": q, "k": k, "v": v, "log_decay": log_decay}
    for name, x in named.items():
        if not isinstance(x, Tensor):
            raise InputError(f"{name} must be a tensor, not {type(x).__name__}")
        if x.device != q.device:
            raise InputError(f"{name} is on {x.device}, q on {q.device}; move them to one device")
        if x.dtype not in _FLOATS:
            raise InputError(f"{name} must be float64, float32, bfloat16 or float16, not {x.dtype}")
    for name in ("q", "k", "v"):
        if named[name].dim() != 4:
            raise InputError(f"{name} must be [batch, heads, length, head size], not {list(named[name].shape)}")
        if named[name].dtype != q.dtype:
            raise InputError(f"{name} is {named[name].dtype}, q is {q.dtype}; give q, k and v one dtype")
    if k.shape != v.shape:
        raise InputError(f"v must have the shape of k {list(k.shape)}, not {list(v.shape)}")
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise InputError(f"k {list(k.shape)} must have the batch and head size of q {list(q.shape)}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise InputError(f"q has {q.shape[1]} heads, which is not a multiple of the {k.shape[1]} heads of k")
    if q.shape[3] == 0:
        raise InputError("q has head size 0")
    if log_decay.shape != q.shape[:3]:
        raise InputError(
            f"log_decay must be [batch, heads, queries] = {list(q.shape[:3])}, not {list(log_decay.shape)}"
        )
    if log_decay.dtype != q.dtype and log_decay.dtype != torch.float32:
        raise InputError(f"log_decay must be {q.dtype} like q, or float32, not {log_decay.dtype}")


def _reference_problem(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, options: dict[str, Any], dropout_p: float, seed: Tensor | None
) -> Problem:
    if not torch.compiler.is_compiling():  # the reference is plain torch; a traced graph cannot look at values
        check_values(log_decay, options["threshold"])
    return Problem(q, k, v, log_decay, **options, dropout_p=dropout_p, dropout_seed=seed, needs_grad=True)


def _options(
    q: Tensor,
    k: Tensor,
    log_decay: Tensor,
    scale: float | None,
    threshold: float | Tensor,
    exclude_self: bool | Tensor,
    key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    query_start: int | None,
    score_bound: float | Tensor | None,
    tolerance: float,
    surrogate_width: float | None = None,
) -> dict[str, Any]:
    """The caller's options in the form that Problem holds them."""
    batch, heads, query_count, width = q.shape
    key_count = k.shape[2]
    if query_start is None:
        query_start = key_count - query_count
        if query_start < 0:
            raise InputError(
                f"q has {query_count} positions but k only {key_count}; there must be a key at each query's position"
            )
    elif query_start < 0 or query_start + query_count > key_count:
        raise InputError(
            f"query_start {query_start} with {query_count} queries does not fit into {key_count} keys; "
            "there must be a key at each query's position"
        )
    scale = 1.0 / math.sqrt(width) if scale is None else float(scale)
    if not (math.isfinite(scale) and scale > 0.0):
        raise InputError(f"scale must be a positive number, not {scale}")
    if not 0.0 <= tolerance < 1.0:
        raise InputError(f"tolerance must be in [0, 1), not {tolerance}")
    if surrogate_width is not None and not (math.isfinite(surrogate_width) and surrogate_width > 0.0):
        raise InputError(f"surrogate_width must be a positive number or None, not {surrogate_width}")

    threshold_tensor, threshold_value = None, 0.0
    if isinstance(threshold, Tensor):
        if threshold.shape != q.shape[:3]:
            raise InputError(f"threshold must be a float or {list(q.shape[:3])}, not {list(threshold.shape)}")
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        threshold_tensor = (threshold if surrogate_width else threshold.detach()).to(q.device, wide)
    else:
        threshold_value = float(threshold)
        if not (threshold_value >= 0.0 and math.isfinite(threshold_value)):
            raise InputError(f"threshold must be a number >= 0, not {threshold}")

    if isinstance(exclude_self, Tensor):
        if exclude_self.shape != (heads,) or exclude_self.dtype != torch.bool:
            raise InputError(
                f"exclude_self must be a bool or a bool tensor [{heads}], "
                f"not {exclude_self.dtype} {list(exclude_self.shape)}"
            )
        own: Tensor | None = exclude_self.to(q.device)
    else:
        own = torch.ones(heads, dtype=torch.bool, device=q.device) if exclude_self else None

    if key_padding_mask is not None:
        if key_padding_mask.shape != (batch, key_count) or key_padding_mask.dtype != torch.bool:
            raise InputError(
                f"key_padding_mask must be bool [{batch}, {key_count}] with True for real keys, "
                f"not {key_padding_mask.dtype} {list(key_padding_mask.shape)}"
            )
        if key_padding_mask.device != q.device:
            raise InputError(
                f"key_padding_mask is on {key_padding_mask.device}, q on {q.device}; move them to one device"
            )

    bound = None
    if isinstance(score_bound, Tensor):
        if score_bound.shape != (heads,):
            raise InputError(f"score_bound must be a float or [{heads}], not {list(score_bound.shape)}")
        bound = score_bound.detach().to(q.device, torch.float32)
    elif score_bound is not None:
        if not score_bound >= 0.0:
            raise InputError(f"score_bound must be >= 0, not {score_bound}")
        bound = torch.full((heads,), float(score_bound), dtype=torch.float32, device=q.device)

    return {
        "threshold": threshold_tensor,
        "threshold_value": threshold_value,
        "exclude_self": own,
        "key_padding_mask": key_padding_mask,
        "first_key": None if cu_seqlens is None else _first_keys(cu_seqlens, q, key_count, query_start),
        "query_start": query_start,
        "scale": scale,
        "score_bound": bound,
        "tolerance": float(tolerance),
        "surrogate_width": float(surrogate_width or 0.0),
    }


def _first_keys(cu_seqlens: Tensor, q: Tensor, key_count: int, query_start: int) -> Tensor:
    """int32 [Tq]: where each query's own sequence begins."""
    if q.shape[0] != 1:
        raise InputError(f"cu_seqlens packs sequences along one row: batch must be 1, not {q.shape[0]}")
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise InputError(
            "cu_seqlens must be an int32 or int64 vector 0, end, end, ..., "
            f"not {cu_seqlens.dtype} {list(cu_seqlens.shape)}"
        )
    ends = cu_seqlens.to(q.device)
    if not torch.compiler.is_compiling() and ends.device.type == "cpu":
        steps = ends.diff()
        if int(ends[0]) != 0 or int(ends[-1]) != key_count or bool((steps < 0).any()):
            raise InputError(f"cu_seqlens must rise from 0 to the number of keys, {key_count}; got {ends.tolist()[:8]}")
    position = query_start + torch.arange(q.shape[2], device=q.device, dtype=ends.dtype)
    return ends[torch.searchsorted(ends, position, right=True) - 1].to(torch.int32)


def _seed(dropout_seed: int | Tensor | None, device: torch.device) -> Tensor:
    if dropout_seed is None:
        return torch.randint(0, 2**62, (), dtype=torch.int64, device=device)
    if isinstance(dropout_seed, Tensor):
        if dropout_seed.numel() != 1 or dropout_seed.dtype != torch.int64:
            raise InputError(
                f"dropout_seed must be an int or one int64, not {dropout_seed.dtype} {list(dropout_seed.shape)}"
            )
        return dropout_seed.reshape(()).to(device)
    return torch.tensor(dropout_seed, dtype=torch.int64, device=device)
