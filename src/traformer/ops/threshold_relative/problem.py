"""One attention problem in normal form: what api.py makes of the caller's arguments and what every backend takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Problem:
    """Tensors keep the caller's strides; options are resolved, so a backend has nothing left to decide."""

    q: Tensor  # [B, Hq, Tq, D]
    k: Tensor  # [B, Hkv, Tk, D]
    v: Tensor  # [B, Hkv, Tk, D]
    log_decay: Tensor  # [B, Hq, Tq], <= 0
    threshold: Tensor | None  # [B, Hq, Tq], or None: threshold_value everywhere
    threshold_value: float
    exclude_self: Tensor | None  # bool [Hq]
    key_padding_mask: Tensor | None  # bool [B, Tk], True = real key
    first_key: Tensor | None  # int32 [Tq]: leftmost key that a query may see (packing)
    query_start: int  # query t stands at position query_start + t and sees keys up to there
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

    @property
    def compute_dtype(self) -> torch.dtype:
        """Scores, sums and counts are held in this type: fp64 for fp64 inputs, else fp32."""
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    @property
    def heads_per_key_head(self) -> int:
        return self.q.shape[1] // self.k.shape[1]


def empty_heads_last(like: Tensor, heads: int, length: int, dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialised [B, H, T, D] tensor stored as [B, T, H, D], so that merging the heads needs no copy."""
    return like.new_empty(like.shape[0], length, heads, like.shape[3], dtype=dtype or like.dtype).transpose(1, 2)


def forward_outputs(q: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Uninitialised (out, normaliser, reach, kept) for queries q; the layout every backend must produce."""
    batch, heads, length, _ = q.shape
    row = (batch, heads, length)
    return (
        empty_heads_last(q, heads, length),
        q.new_empty(row, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32),
        q.new_empty(row, dtype=torch.int32),
        q.new_empty(row, dtype=torch.int32),
    )


def backward_outputs(
    q: Tensor, k: Tensor, log_decay: Tensor, surrogate_width: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Uninitialised (dq, dk, dv, dlog_decay, dthreshold); the last is empty without a surrogate."""
    return (
        empty_heads_last(q, q.shape[1], q.shape[2]),
        empty_heads_last(k, k.shape[1], k.shape[2]),
        empty_heads_last(k, k.shape[1], k.shape[2]),
        log_decay.new_empty(log_decay.shape),
        q.new_empty(
            log_decay.shape if surrogate_width else (0,),
            dtype=torch.float64 if q.dtype == torch.float64 else torch.float32,
        ),
    )
