"""One attention problem in normal form: what options.py makes of a caller's arguments and what every backend takes."""

from __future__ import annotations

from typing import NamedTuple, get_type_hints

import torch
from torch import Tensor

Value = Tensor | float | int | bool | None


class Problem(NamedTuple):
    """Tensors keep the caller's strides; options are resolved, so a backend has nothing left to decide.

    A field added here reaches every backend: the registered operators take these fields, in order, as their arguments.
    A tuple, because every decoded token makes one, and a dataclass of as many fields takes three times as long.
    """

    q: Tensor  # [B, Hq, Tq, D]
    k: Tensor  # [B, Hkv, Tk, D]
    v: Tensor  # [B, Hkv, Tk, D]
    log_decay: Tensor  # [B, Hq, Tq], <= 0
    threshold: Tensor | None  # [B, Hq, Tq], or None: threshold_value everywhere
    threshold_value: float
    exclude_self: Tensor | None  # bool [Hq]
    key_padding_mask: Tensor | None  # bool [B, Tk], True = real key
    first_key: Tensor | None  # int32 [Tq]: leftmost key that a query may see (packing)
    query_start: int  # query t is at position query_start + t and sees keys up to there
    scale: float
    score_bound: Tensor | None  # [Hq], or None: computed from norms
    dropout_p: float
    dropout_seed: Tensor | None  # int64, 0-dim
    tolerance: float  # 0 switches the early exit off
    needs_grad: bool  # stop by the stricter rule that also bounds gradients
    key_low: Tensor | None = None  # the key index's tensors, see key_index.py
    key_high: Tensor | None = None
    key_norm: Tensor | None = None
    surrogate_width: float = 0.0  # > 0: removed keys have a gradient, see api.py

    def for_backward(self) -> Problem:
        """Without what only the forward needs: the backward's walk ends where the forward's did."""
        return self._replace(
            score_bound=None, tolerance=0.0, needs_grad=True, key_low=None, key_high=None, key_norm=None
        )

    def run_of_queries(self, start: int, stop: int) -> Problem:
        """The same problem for the queries [start, stop) alone."""
        rows = slice(start, stop)
        return self._replace(
            q=self.q[:, :, rows],
            log_decay=self.log_decay[:, :, rows],
            threshold=None if self.threshold is None else self.threshold[:, :, rows],
            first_key=None if self.first_key is None else self.first_key[rows],
            query_start=self.query_start + start,
        )

    @property
    def compute_dtype(self) -> torch.dtype:
        """Scores, sums and counts are held in this type: fp64 for fp64 inputs, else fp32."""
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    @property
    def heads_per_key_head(self) -> int:
        return self.q.shape[1] // self.k.shape[1]


_SCHEMA_TYPES = {Tensor: "Tensor", Tensor | None: "Tensor?", float: "float", int: "SymInt", bool: "bool"}
# The fields as torch.library writes arguments: "Tensor q, Tensor k, ..., float surrogate_width"
SCHEMA = ", ".join(f"{_SCHEMA_TYPES[kind]} {name}" for name, kind in get_type_hints(Problem).items())


class Forward(NamedTuple):
    """What a backend's forward returns."""

    out: Tensor  # [B, Hq, Tq, D]
    normaliser: Tensor  # [B, Hq, Tq] log of the sum of weights; inf where nothing is kept, NaN in a NaN row
    reach: Tensor  # int32 [B, Hq, Tq]: leftmost key that was read
    kept: Tensor  # int32 [B, Hq, Tq]: keys above the threshold among those read


class Saved(NamedTuple):
    """What the backward gets back of it."""

    out: Tensor
    normaliser: Tensor
    reach: Tensor


class Gradients(NamedTuple):
    """What a backend's backward returns: the gradients of the fields of the same name."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    threshold: Tensor  # empty without a surrogate


def empty_heads_last(like: Tensor, heads: int, length: int, dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialised [B, H, T, D] tensor stored as [B, T, H, D], so that merging the heads needs no copy.

    It is no view of another tensor, so the caller may change it in place.
    """
    batch, _, _, width = like.shape
    strides = (length * heads * width, width, heads * width, 1)
    return torch.empty_strided((batch, heads, length, width), strides, dtype=dtype or like.dtype, device=like.device)


def empty_forward(problem: Problem) -> Forward:
    """Uninitialised outputs in the layout that every backend must produce."""
    q = problem.q
    batch, heads, length, _ = q.shape
    row = (batch, heads, length)
    return Forward(
        empty_heads_last(q, heads, length),
        q.new_empty(row, dtype=problem.compute_dtype),
        q.new_empty(row, dtype=torch.int32),
        q.new_empty(row, dtype=torch.int32),
    )


def empty_gradients(problem: Problem) -> Gradients:
    q, k, log_decay = problem.q, problem.k, problem.log_decay
    return Gradients(
        empty_heads_last(q, q.shape[1], q.shape[2]),
        empty_heads_last(k, k.shape[1], k.shape[2]),
        empty_heads_last(k, k.shape[1], k.shape[2]),
        log_decay.new_empty(log_decay.shape),
        q.new_empty(log_decay.shape if problem.surrogate_width else (0,), dtype=problem.compute_dtype),
    )
