"""Threshold Relative Attention (TRA): keep the keys that score above a threshold, count distance among the kept."""

from __future__ import annotations

import math
from typing import Any, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from traformer.errors import InputError, unknown_name
from traformer.layers.base import AttentionLayer
from traformer.layers.cache import KeyValueCache
from traformer.layers.context import AttentionContext
from traformer.ops import (
    AttentionMap,
    AttentionStats,
    attention_map,
    attention_stats,
    available_backends,
    threshold_relative_attention,
)
from traformer.ops.threshold_relative.backends import choose_backend
from traformer.ops.threshold_relative.key_index import KeyIndex
from traformer.ops.threshold_relative.options import KeyOptions
from traformer.types import Options

# Keys from which on an index of them pays: keeping it costs a token more than reading fewer keys than these.
INDEX_FROM = 4096
FORGET_ALL = -1e4  # a log decay with which the nearest kept key has all the weight
# Keys, and queries at once, from which on it pays to find out first which queries keep no key at all.
BALLS_FROM = 16384
BALLS_QUERIES = 64


class _Speed(TypedDict):
    """Options of the operator that decide its speed."""

    score_bound: float | Tensor | None
    key_index: KeyIndex | None
    tolerance: float
    backend: str


class ThresholdRelativeAttention(AttentionLayer):
    """TRA with a decay gate per query and head; no position of any kind is written into queries or keys.

    Source: Opper et al. 2025, "TRA: Better Length Generalisation with Threshold Relative Attention":
    s_ij = q_i . k_j / sqrt(d) after QK-norm, keep_i = { j <= i : s_ij > 0 }, c_ij = kept keys in [j .. i],
    a_ij = softmax over keep_i of s_ij + g_i c_ij, g_i = logsigmoid(w_h . x_i + b_h). A query without a key outputs 0.
    Path: the fused operator, which stops reading where the rest cannot matter.

    Options, all off or at the published value by default:
        threshold     keys must score above it (>= 0)
        exclude_self  the query's own key is left out: True, "half" (of the heads, the first) or a list of bool
        previous_heads  heads that read the previous token alone, whatever it scores: as exclude_self
        temperature   a learned factor exp(t_h) on each head's scores, t_h starting at 0 and trained at 10 times the lr
        tolerance     share of a row's weight that the early exit may drop; 0 reads every key
        backend       which kernel computes it ("auto": the fastest available, same result)
    """

    name = "tra"
    surrogate_width: float | None = None  # of a straight-through gradient in training; TRA as published has none

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        qk_norm: bool = True,
        dropout: float = 0.0,
        threshold: float = 0.0,
        exclude_self: bool | str | list[bool] = False,
        previous_heads: bool | str | list[bool] = False,
        temperature: bool = False,
        tolerance: float = 2.0**-24,
        backend: str = "auto",
        **more: Any,  # the rest of LayerArguments, and the options of variants
    ) -> None:
        super().__init__(
            embed_dim,
            num_heads,
            num_kv_heads,
            head_dim=head_dim,
            qk_norm=qk_norm,
            dropout=dropout,
            threshold=threshold,
            exclude_self=exclude_self,
            previous_heads=previous_heads,
            temperature=temperature,
            tolerance=tolerance,
            backend=backend,
            **more,
        )

    def add_parameters(self) -> None:
        super().add_parameters()
        self.decay_proj = nn.Linear(self.embed_dim, self.num_heads, bias=True)

    @classmethod
    def check_options(cls, options: Options, num_heads: int, head_dim: int) -> None:
        super().check_options(options, num_heads, head_dim)
        threshold = options["threshold"]
        if not (isinstance(threshold, (int, float)) and 0 <= threshold < math.inf):
            raise InputError(f"attention option threshold must be a finite number >= 0, got {threshold!r}")
        if options["backend"] != "auto" and options["backend"] not in available_backends():
            raise unknown_name("backend", options["backend"], ["auto", *available_backends()])

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, hidden_states: Tensor, context: AttentionContext
    ) -> tuple[Tensor, Tensor | None]:
        q, log_decay, options, speed = self._problem(q, k, hidden_states, context)
        weights = attention_map(q, k, log_decay, **options).weights if context.output_attentions else None
        empty = self._empty_rows(q, k, options, context)
        if empty is not None:
            q, log_decay = _let_go(empty, q, k, log_decay, options["query_start"] or 0)
        dropout_p = self.dropout_p if self.training else 0.0
        out = threshold_relative_attention(
            q, k, v, log_decay, **options, **speed, dropout_p=dropout_p, surrogate_width=self.surrogate_width
        )
        return out if empty is None else out.masked_fill(empty[..., None], 0.0), weights

    def _problem(
        self, q: Tensor, k: Tensor, hidden_states: Tensor, context: AttentionContext
    ) -> tuple[Tensor, Tensor, KeyOptions, _Speed]:
        """Queries and decay as the op takes them, options that decide the result, and options that decide the speed."""
        query_start, key_padding_mask = self._query_start(q, k, context)
        excluded = self.excluded_heads
        options: KeyOptions = {
            "scale": self.scale,
            "threshold": self.all_thresholds(hidden_states, context),
            "exclude_self": excluded if isinstance(excluded, bool) else torch.tensor(excluded, device=q.device),
            "key_padding_mask": key_padding_mask,
            "cu_seqlens": context.cu_seqlens,
            "query_start": query_start,
        }
        speed: _Speed = {
            "score_bound": self.score_bound(q.dtype, k.shape[2]),
            "key_index": self._key_index(k, context),
            "tolerance": self.option["tolerance"],
            "backend": self.option["backend"],
        }
        return self.queries(q, k, context), self.decays(hidden_states), options, speed

    def queries(self, q: Tensor, k: Tensor, context: AttentionContext) -> Tensor:
        """Queries as the op takes them: those of `previous_heads` are the previous token's key, the nearest they see.

        Such a query has no gradient, and its key scores above 0, which is the threshold of these heads.
        """
        if self.previous_heads is None:
            return q
        chosen = [head for head, is_chosen in enumerate(self.previous_heads) if is_chosen]
        heads = torch.tensor(chosen, device=q.device)
        previous = context.of_previous(k.detach().index_select(1, heads // (self.num_heads // k.shape[1])), q.shape[2])
        if self.temperature is not None:  # the bound of the scores has it, too
            previous = previous * self.temperature.detach()[heads].exp().to(previous.dtype)[:, None, None]
        return q.index_copy(1, heads, previous)

    def decays(self, hidden_states: Tensor) -> Tensor:
        """Log of the decay that each query applies, [B, Hq, T]: the gate's, or all at once in `previous_heads`."""
        log_decay = self.log_decay(hidden_states)
        if self.previous_heads is None:
            return log_decay
        return log_decay.masked_fill(self.looks_back(log_decay), FORGET_ALL)

    def log_decay(self, hidden_states: Tensor) -> Tensor:
        """Log of the decay that each query's gate sets, [B, Hq, T]."""
        gate = self.decay_proj(hidden_states)  # [B, T, Hq]
        # The gate multiplies counts that run into the thousands: never in half precision.
        return F.logsigmoid(gate if gate.dtype == torch.float64 else gate.float()).transpose(1, 2)

    def thresholds(self, hidden_states: Tensor, context: AttentionContext) -> float | Tensor:
        """What a score must exceed: one number, or [B, Hq, T]."""
        threshold: float = self.option["threshold"]
        return threshold

    def all_thresholds(self, hidden_states: Tensor, context: AttentionContext) -> float | Tensor:
        """The same, and 0 in `previous_heads`, which keep their key whatever it scores."""
        threshold = self.thresholds(hidden_states, context)
        if self.previous_heads is None or not (isinstance(threshold, Tensor) or threshold):
            return threshold
        if not isinstance(threshold, Tensor):
            dtype = torch.float64 if hidden_states.dtype == torch.float64 else torch.float32
            shape = (hidden_states.shape[0], self.num_heads, hidden_states.shape[1])
            threshold = hidden_states.new_full(shape, threshold, dtype=dtype)
        return threshold.masked_fill(self.looks_back(threshold), 0.0)

    def whole_map(self, q: Tensor, k: Tensor, hidden_states: Tensor, context: AttentionContext) -> AttentionMap | None:
        """Scores, kept keys, distances and weights of an `attend` on the same tensors; for looking at.

        None for a variant whose weights the operator does not compute.
        """
        return self._map(q, k, hidden_states, context)

    def _map(self, q: Tensor, k: Tensor, hidden_states: Tensor, context: AttentionContext) -> AttentionMap:
        q, log_decay, options, _ = self._problem(q, k, hidden_states, context)
        found = attention_map(q, k, log_decay, **options)
        if self.previous_heads is None:
            return found
        # Such a head leaves one key, the nearest, whatever else scores above the threshold.
        more = self.looks_back(q)[..., None] & (found.distance > 1)
        return found._replace(keep=found.keep & ~more, distance=found.distance.masked_fill(more, 0))

    def keeps(self, q: Tensor, k: Tensor, hidden_states: Tensor, context: AttentionContext) -> Tensor | None:
        """Keys above the threshold in an `attend` on the same tensors, bool [B, Hq, T, Tk]; for looking at."""
        return self._map(q, k, hidden_states, context).keep

    def reads(self, q: Tensor, k: Tensor, hidden_states: Tensor, context: AttentionContext) -> AttentionStats:
        """Keys read and kept by each query of an `attend` on the same tensors; for measurement."""
        q, log_decay, options, speed = self._problem(q, k, hidden_states, context)
        empty = self._empty_rows(q, k, options, context)
        if empty is not None:
            q, log_decay = _let_go(empty, q, k, log_decay, options["query_start"] or 0)
        read, kept = attention_stats(q, k, log_decay, **options, **speed)
        if self.previous_heads is not None:
            kept = torch.where(self.looks_back(kept), kept.clamp(max=1), kept)
        return AttentionStats(read, kept if empty is None else kept.masked_fill(empty, 0))

    def _empty_rows(self, q: Tensor, k: Tensor, options: KeyOptions, context: AttentionContext) -> Tensor | None:
        """Which queries keep no key for certain, [B, Hq, T], where it pays to know: they would read all keys for it."""
        cache = context.layer_cache(self.layer_idx)
        if cache is None or k.shape[2] < BALLS_FROM or q.shape[2] < BALLS_QUERIES or not self.option["tolerance"]:
            return None
        if torch.compiler.is_compiling() or (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad)):
            return None
        balls = cache.covered(k) if isinstance(cache, KeyValueCache) else None
        return None if balls is None else balls.keeps_nothing(q, self.scale, options["threshold"])

    def _key_index(self, k: Tensor, context: AttentionContext) -> KeyIndex | None:
        """The cache's index of its keys, where it keeps one and the kernel that will run can use it; else None."""
        cache = context.layer_cache(self.layer_idx)
        if cache is None or k.shape[2] < INDEX_FROM or torch.compiler.is_compiling():
            return None
        if not isinstance(cache, KeyValueCache):
            return None
        if choose_backend(self.option["backend"], k.device, k.dtype, k.shape[3]) != "cpu":
            return None
        return cache.indexed(k)

    def _query_start(self, q: Tensor, k: Tensor, context: AttentionContext) -> tuple[int, Tensor | None]:
        """The position of the first query, as a number, and the padding mask that goes with it."""
        start = context.query_start
        if not isinstance(start, Tensor):
            return start, context.key_padding_mask
        if q.shape[2] > 1 or self.excluded_heads is not False:
            return int(start.item()), context.key_padding_mask
        # One query, its place a tensor (a traced static cache): keys carry no position, so put it at the end of
        # the axis and hide the empty places instead. No number has to be read out of the tensor.
        filled = torch.arange(k.shape[2], device=k.device)[None] <= start
        mask = context.key_padding_mask
        return k.shape[2] - 1, (filled if mask is None else filled & mask).expand(k.shape[0], -1)


def _let_go(empty: Tensor, q: Tensor, k: Tensor, log_decay: Tensor, query_start: int) -> tuple[Tensor, Tensor]:
    """Queries that keep nothing as ones that keep their own key and need no other: their walk ends where it begins."""
    own = F.normalize(k[:, :, query_start : query_start + q.shape[2]], dim=-1)
    own = own.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return torch.where(empty[..., None], own, q), log_decay.masked_fill(empty, FORGET_ALL)
