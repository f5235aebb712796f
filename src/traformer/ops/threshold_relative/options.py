"""The operator's options, declared once, and the way from a caller's arguments to a Problem: every check is here."""

from __future__ import annotations

import functools
import math
from typing import TypedDict, cast

import torch
from torch import Tensor

from traformer.errors import InputError, unknown_name
from traformer.ops.threshold_relative.key_index import KeyIndex
from traformer.ops.threshold_relative.problem import Problem

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class KeyOptions(TypedDict, total=False):
    """Which keys a query sees and keeps: what `attention_map` takes."""

    scale: float | None  # default 1/sqrt(D)
    threshold: float | Tensor  # >= 0, or [B, Hq, Tq]; default 0
    exclude_self: bool | Tensor  # bool, or bool [Hq]
    key_padding_mask: Tensor | None  # bool [B, Tk], True = real key
    cu_seqlens: Tensor | None  # int [n+1]
    query_start: int | None  # default Tk - Tq


class WalkOptions(KeyOptions, total=False):
    """And how far a fused backend walks: what `attention_stats` takes."""

    score_bound: float | Tensor | None  # float or [Hq]
    key_index: KeyIndex | None
    tolerance: float  # default 2^-24


class AttentionOptions(WalkOptions, total=False):
    """And what becomes of weights and gradients: what `threshold_relative_attention` takes."""

    dropout_p: float  # default 0
    dropout_seed: int | Tensor | None
    surrogate_width: float | None


def make_problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    given: KeyOptions,
    kind: type[KeyOptions] = AttentionOptions,
    needs_grad: bool | None = None,
) -> Problem:
    """Check everything that can be checked without reading values, and return the Problem.

    kind: which options may be given; needs_grad: by default, whether autograd will ask for a gradient.
    """
    for name in given:
        if name not in kind.__annotations__:
            raise unknown_name("option", name, kind.__annotations__)
    options = cast(AttentionOptions, given)  # no key is required
    _check_tensors(q, k, v, log_decay)
    query_start = _query_start(options.get("query_start"), q, k)
    width = options.get("surrogate_width")
    surrogate_width = 0.0 if width is None else _number("surrogate_width", width)
    if width is not None and not (math.isfinite(surrogate_width) and surrogate_width > 0.0):
        raise InputError(f"surrogate_width must be a positive number or None, not {width}")
    threshold, threshold_value = _threshold(options.get("threshold", 0.0), q, learned=surrogate_width > 0.0)
    if needs_grad is None:
        learning = (q, k, v, log_decay) if threshold is None else (q, k, v, log_decay, threshold)
        needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in learning)

    factor = options.get("scale")
    scale = 1.0 / math.sqrt(q.shape[3]) if factor is None else _number("scale", factor)
    if not (math.isfinite(scale) and scale > 0.0):
        raise InputError(f"scale must be a positive number, not {scale}")
    tolerance = _number("tolerance", options.get("tolerance", 2**-24))
    if not 0.0 <= tolerance < 1.0:
        raise InputError(f"tolerance must be in [0, 1), not {tolerance}")
    dropout_p = _number("dropout_p", options.get("dropout_p", 0.0))
    if not 0.0 <= dropout_p < 1.0:
        raise InputError(f"dropout_p must be in [0, 1), not {dropout_p}")
    index = options.get("key_index")
    if index is not None and not isinstance(index, KeyIndex):
        raise InputError(f"key_index must be a KeyIndex, not {type(index).__name__}")
    low, high, norm = (None, None, None) if index is None else index.tensors(query_start + q.shape[2])
    return Problem(
        q=q,
        k=k,
        v=v,
        log_decay=log_decay,
        threshold=threshold,
        threshold_value=threshold_value,
        exclude_self=_exclude_self(options.get("exclude_self", False), q),
        key_padding_mask=_key_padding_mask(options.get("key_padding_mask"), q, k),
        first_key=_first_key(options.get("cu_seqlens"), q, k, query_start),
        query_start=query_start,
        scale=scale,
        score_bound=_score_bound(options.get("score_bound"), q),
        dropout_p=dropout_p,
        dropout_seed=_seed(options.get("dropout_seed"), q.device) if dropout_p > 0.0 else None,
        tolerance=tolerance,
        needs_grad=needs_grad,
        key_low=low,
        key_high=high,
        key_norm=norm,
        surrogate_width=surrogate_width if needs_grad else 0.0,
    )


def check_values(log_decay: Tensor, threshold: Tensor | None) -> None:
    """Checks that need the values themselves: made inside the registered operators, since a traced graph cannot look.

    Skipped off the CPU, where looking would wait for the device: there a row with log_decay -inf is NaN, and one whose
    threshold is NaN keeps nothing. A NaN in log_decay passes: it makes its row NaN, like any other NaN input.
    """
    if log_decay.device.type != "cpu":
        return
    if log_decay.numel():
        low, high = (float(x) for x in torch.aminmax(log_decay))
        if math.isnan(low):  # passes, but not what it hides
            low, high = (float(x) for x in torch.aminmax(log_decay.nan_to_num(nan=0.0, neginf=-math.inf)))
        if high > 0.0:
            raise InputError("log_decay must be <= 0 everywhere (it is the log of a decay, e.g. logsigmoid of a gate)")
        if low == -math.inf:
            raise InputError(
                "log_decay must not be -inf; for a query that reads its nearest kept key alone, -1e4 is enough"
            )
    if threshold is not None and not bool((threshold >= 0.0).all()):
        raise InputError("threshold must be >= 0 everywhere, and not NaN")


def _number(name: str, value: object) -> float:
    if isinstance(value, (int, float)):
        return float(value)
    if not isinstance(value, (str, bytes)):
        try:
            return float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, RuntimeError):
            pass
    raise InputError(f"{name} must be a number, not {type(value).__name__}")


def _check_dense(name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise InputError(f"{name} must be a tensor, not {type(x).__name__}")
    if x.is_nested or x.layout != torch.strided:
        kind = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
        raise InputError(f"{name} must be a dense tensor, not a {kind} one; make it dense first")


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> None:
    if type(q) is type(k) is type(v) is type(log_decay) is Tensor and _fit(q, k, v, log_decay):
        return
    named = {"q": q, "k": k, "v": v, "log_decay": log_decay}
    for name, x in named.items():
        _check_dense(name, x)
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


def _fit(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> bool:
    """Whether four plain tensors pass every check of `_check_tensors`, in few steps: every decoded token takes them."""
    if any(x.layout is not torch.strided or x.is_nested for x in (q, k, v, log_decay)):
        return False
    dtype, device, shape, keys = q.dtype, q.device, q.shape, k.shape
    return (
        dtype in _FLOATS
        and k.dtype is dtype
        and v.dtype is dtype
        and (log_decay.dtype is dtype or log_decay.dtype is torch.float32)
        and device == k.device == v.device == log_decay.device
        and len(shape) == len(keys) == 4
        and keys == v.shape
        and keys[0] == shape[0]
        and keys[3] == shape[3] > 0
        and keys[1] > 0
        and shape[1] % keys[1] == 0
        and log_decay.shape == shape[:3]
    )


def _query_start(query_start: int | None, q: Tensor, k: Tensor) -> int:
    query_count, key_count = q.shape[2], k.shape[2]
    if query_start is None:
        if key_count < query_count:
            raise InputError(
                f"q has {query_count} positions but k only {key_count}; there must be a key at each query's position"
            )
        return key_count - query_count
    if not isinstance(query_start, (int, torch.SymInt)):
        raise InputError(f"query_start must be an int, not {type(query_start).__name__}")
    if query_start < 0 or query_start + query_count > key_count:
        raise InputError(
            f"query_start {query_start} with {query_count} queries does not fit into {key_count} keys; "
            "there must be a key at each query's position"
        )
    return query_start


def _threshold(threshold: float | Tensor, q: Tensor, learned: bool) -> tuple[Tensor | None, float]:
    """A tensor, or None and one number for all queries."""
    if isinstance(threshold, Tensor):
        _check_dense("threshold", threshold)
        if threshold.shape != q.shape[:3]:
            raise InputError(f"threshold must be a float or {list(q.shape[:3])}, not {list(threshold.shape)}")
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        return (threshold if learned else threshold.detach()).to(q.device, wide), 0.0
    value = _number("threshold", threshold)
    if not (value >= 0.0 and math.isfinite(value)):
        raise InputError(f"threshold must be a number >= 0, not {threshold}")
    return None, value


def _exclude_self(exclude_self: bool | Tensor, q: Tensor) -> Tensor | None:
    heads = q.shape[1]
    if isinstance(exclude_self, Tensor):
        if exclude_self.shape != (heads,) or exclude_self.dtype != torch.bool:
            raise InputError(
                f"exclude_self must be a bool or a bool tensor [{heads}], "
                f"not {exclude_self.dtype} {list(exclude_self.shape)}"
            )
        return exclude_self.to(q.device)
    if not isinstance(exclude_self, bool):
        raise InputError(f"exclude_self must be a bool or a bool tensor [{heads}], not {type(exclude_self).__name__}")
    return torch.ones(heads, dtype=torch.bool, device=q.device) if exclude_self else None


def _key_padding_mask(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    if mask is None:
        return None
    shape = (k.shape[0], k.shape[2])
    _check_dense("key_padding_mask", mask)
    if mask.shape != shape or mask.dtype != torch.bool:
        raise InputError(
            f"key_padding_mask must be bool {list(shape)} with True for real keys, not {mask.dtype} {list(mask.shape)}"
        )
    if mask.device != q.device:
        raise InputError(f"key_padding_mask is on {mask.device}, q on {q.device}; move them to one device")
    return mask


def _first_key(cu_seqlens: Tensor | None, q: Tensor, k: Tensor, query_start: int) -> Tensor | None:
    """int32 [Tq]: where each query's own sequence begins."""
    if cu_seqlens is None:
        return None
    _check_dense("cu_seqlens", cu_seqlens)
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
        if int(ends[0]) != 0 or int(ends[-1]) != k.shape[2] or bool((steps < 0).any()):
            raise InputError(
                f"cu_seqlens must rise from 0 to the number of keys, {k.shape[2]}; got {ends.tolist()[:8]}"
            )
    position = query_start + torch.arange(q.shape[2], device=q.device, dtype=ends.dtype)
    return ends[torch.searchsorted(ends, position, right=True) - 1].to(torch.int32)


def _score_bound(score_bound: float | Tensor | None, q: Tensor) -> Tensor | None:
    heads = q.shape[1]
    if score_bound is None:
        return None
    if isinstance(score_bound, Tensor):
        if score_bound.shape != (heads,):
            raise InputError(f"score_bound must be a float or [{heads}], not {list(score_bound.shape)}")
        return score_bound.detach().to(q.device, torch.float32)
    bound = _number("score_bound", score_bound)
    if not bound >= 0.0:
        raise InputError(f"score_bound must be >= 0, not {score_bound}")
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or q.device.type != "cpu":
        return torch.full((heads,), bound, dtype=torch.float32, device=q.device)
    return _filled(heads, bound)


@functools.lru_cache(maxsize=64)
def _filled(heads: int, bound: float) -> Tensor:
    """A bound for every head, made once: a decode of few keys takes hardly longer than filling a tensor."""
    with torch.inference_mode(False):  # so that a later call may save it for its backward
        return torch.full((heads,), bound, dtype=torch.float32)


def _seed(dropout_seed: int | Tensor | None, device: torch.device) -> Tensor:
    if dropout_seed is None:
        return torch.randint(0, 2**62, (), dtype=torch.int64, device=device)
    if isinstance(dropout_seed, Tensor):
        if dropout_seed.numel() != 1 or dropout_seed.dtype != torch.int64:
            raise InputError(
                f"dropout_seed must be an int or one int64, not {dropout_seed.dtype} {list(dropout_seed.shape)}"
            )
        return dropout_seed.reshape(()).to(device)
    if not isinstance(dropout_seed, (int, torch.SymInt)):
        raise InputError(f"dropout_seed must be an int or one int64, not {type(dropout_seed).__name__}")
    return torch.tensor(dropout_seed, dtype=torch.int64, device=device)
