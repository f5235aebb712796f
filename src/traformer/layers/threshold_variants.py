"""TRA's ablations and extensions: one layer with a switch for each part; `traformer.methods` has the names."""

from __future__ import annotations

import math
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from traformer.errors import InputError, unknown_name
from traformer.layers.alibi import slope_bias
from traformer.layers.context import AttentionContext
from traformer.layers.forgetting import cumulative_gates, log_forget_gates
from traformer.layers.options import ThresholdArguments, check_bool, gate_biases, is_number
from traformer.layers.threshold_relative import ThresholdRelativeAttention
from traformer.ops import AttentionMap
from traformer.ops.alibi import alibi_slopes
from traformer.ops.eager import widened
from traformer.ops.threshold_variants import threshold_variant_attention
from traformer.types import Options

DISTANCES = ("contextual", "ordinary", "forgetting", "none")
DECAYS = ("gate", "fixed")
_START_OF_LEARNED_THRESHOLD = -2.0  # softplus(-2) = 0.13: near the published 0, yet far enough to have a gradient
_SURROGATE_WIDTH = 0.5


class ThresholdVariantAttention(ThresholdRelativeAttention):
    """TRA with parts replaced, for ablations and extensions: which keys stay, how distance is counted, how it decays.

    Source: this project; the parts are TRA's, ALiBi's (Press et al. 2022) and FoT's (Lin et al. 2025).

    Options beyond TRA's own; their defaults are TRA as published:
        distance    "contextual": kept keys are counted. "none": no distance (NoPE on the kept keys). "ordinary": a
                    fixed slope per head times i - j, as ALiBi. "forgetting": gates of all tokens between, as FoT
        removal     False: no key is removed; the softmax runs over all, distance counts those above the threshold
        decay       "gate": learned, from the query's token. "fixed": minus ALiBi's slope of the head
        gate_bias   the decay gate's bias at the start (None: torch's own); 3 forgets 5 % per kept key, -2 forgets 88 %.
                    A number, a list with one for each head, or "halves": -6 in the first half of the heads, which
                    look at their nearest kept key alone, 6 in the second, which forgets 0.25 % per kept key
        threshold_growth  a: the threshold is threshold + a * sqrt(2 log n) for the n-th token. After QK-norm scores of
                    unrelated keys are near a standard normal, whose maximum over n draws grows like sqrt(2 log n)
        margin      m: in training each query's threshold is drawn from threshold + [0, 2m], in evaluation it is
                    threshold + m. Keys near it are kept or removed by chance, so training drives them away from it
        sharpening  p: the scores of the n-th token are multiplied by n^p, p learned for each head from this start and
                    trained at 10 times the lr (None: no such factor). More keys share a softmax the longer the text
                    is; a factor that grows leaves the best of them their weight. At threshold 0 it changes nothing in
                    which keys are kept, since it is positive
        straight_through  training gives removed keys a gradient: the forward is TRA's own, the backward is as if each
                    key were weighted by sigmoid((s - threshold) / 0.5), a removed one as if it were kept
        learned_threshold  an input-adaptive threshold: softplus(w_h . x + b_h) on top of `threshold`, b_h starting at
                    -2. The choice of keys has no gradient, so it is trained with straight_through

    The fused operator serves contextual or no distance with removal; the others are eager, in blocks of queries.
    """

    name = "tra_variant"

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        distance: str = "contextual",
        removal: bool = True,
        decay: str = "gate",
        gate_bias: float | str | list[float] | None = None,
        threshold_growth: float = 0.0,
        margin: float = 0.0,
        sharpening: float | None = None,
        straight_through: bool = False,
        learned_threshold: bool = False,
        **more: Unpack[ThresholdArguments],
    ) -> None:
        super().__init__(
            embed_dim,
            num_heads,
            num_kv_heads,
            distance=distance,
            removal=removal,
            decay=decay,
            gate_bias=gate_bias,
            threshold_growth=threshold_growth,
            margin=margin,
            sharpening=sharpening,
            straight_through=straight_through,
            learned_threshold=learned_threshold,
            **more,
        )

    def add_parameters(self) -> None:
        super().add_parameters()
        self.distance: str = self.option["distance"]
        if self.option["straight_through"] or self.option["learned_threshold"]:
            self.surrogate_width = _SURROGATE_WIDTH
        self.has_gate = self.distance in ("contextual", "forgetting") and self.option["decay"] == "gate"
        if not self.has_gate:
            self.decay_proj = None  # type: ignore[assignment]
        elif self.option["gate_bias"] is not None:
            self.decay_proj.bias_start = gate_biases(self.option["gate_bias"], self.num_heads)  # type: ignore[assignment]
        self.sharpening: nn.Parameter | None = None
        if self.option["sharpening"] is not None:
            self.sharpening = nn.Parameter(torch.full((self.num_heads,), float(self.option["sharpening"])))
            self.sharpening.lr_scale = 10.0  # type: ignore[attr-defined]  # as the temperature's
        self.slopes = alibi_slopes(self.num_heads)
        self.threshold_proj = nn.Linear(self.embed_dim, self.num_heads) if self.option["learned_threshold"] else None
        if self.threshold_proj is not None:
            self.threshold_proj.bias_start = _START_OF_LEARNED_THRESHOLD  # type: ignore[assignment]

    @classmethod
    def check_options(cls, options: Options, num_heads: int, head_dim: int) -> None:
        super().check_options(options, num_heads, head_dim)
        for name, known in (("distance", DISTANCES), ("decay", DECAYS)):
            if options[name] not in known:
                raise unknown_name(f"attention option {name}", options[name], known)
        for name in ("removal", "straight_through", "learned_threshold"):
            check_bool(name, options[name])
        for name in ("threshold_growth", "margin"):
            if not (is_number(options[name]) and options[name] >= 0):
                raise InputError(f"attention option {name} must be a finite number >= 0, got {options[name]!r}")
        if options["sharpening"] is not None and not is_number(options["sharpening"]):
            raise InputError(
                f"attention option sharpening must be a finite number or null, got {options['sharpening']!r}"
            )
        distance, fixed, bias = options["distance"], options["decay"] == "fixed", options["gate_bias"]
        if fixed and distance != "contextual":
            raise InputError(
                f"attention option decay 'fixed' is for contextual distance, not {distance!r}; leave it out"
            )
        if bias is not None and (fixed or distance not in ("contextual", "forgetting")):
            raise InputError("attention option gate_bias needs a learned gate, which this combination does not have")
        chooses = options["learned_threshold"] or options["straight_through"]
        if not options["removal"] and (distance != "contextual" or chooses):
            raise InputError(
                "attention option removal=false only makes sense with contextual distance and a given threshold"
            )

    def reset_own_parameters(self) -> None:
        super().reset_own_parameters()
        if self.sharpening is not None:
            nn.init.constant_(self.sharpening, float(self.option["sharpening"]))

    def place(self, q: Tensor, k: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor]:
        if self.sharpening is None:
            return q, k
        seen = (context.places(q.shape[2], q.device) + 1).clamp(min=1).to(self.sharpening.dtype)  # [B or 1, T]
        factor = (self.sharpening[:, None] * seen.log()[:, None, :]).exp()  # [B or 1, H, T]
        return q * factor[..., None].to(q.dtype), k

    def score_bound(self, dtype: torch.dtype, keys: int) -> float | Tensor | None:
        bound = super().score_bound(dtype, keys)
        if bound is None or self.sharpening is None:
            return bound
        return bound * (self.sharpening.detach().clamp(min=0).float() * math.log(max(keys, 1))).exp()

    def key_state(self, q: Tensor, hidden_states: Tensor, context: AttentionContext) -> Tensor | None:
        if self.distance != "forgetting":
            return None
        return log_forget_gates(self.decay_proj(hidden_states), context, self.num_key_heads)

    def log_decay(self, hidden_states: Tensor) -> Tensor:
        if self.has_gate:
            return super().log_decay(hidden_states)
        batch, length, _ = hidden_states.shape
        rates = [-slope for slope in self.slopes] if self.option["decay"] == "fixed" else [0.0] * self.num_heads
        dtype = torch.float64 if hidden_states.dtype == torch.float64 else torch.float32
        rate = torch.tensor(rates, device=hidden_states.device, dtype=dtype)
        return rate[:, None].expand(batch, -1, length)

    def thresholds(self, hidden_states: Tensor, context: AttentionContext) -> float | Tensor:
        growth, margin = self.option["threshold_growth"], self.option["margin"]
        base: float = self.option["threshold"]
        if not growth and not margin and self.threshold_proj is None:
            return base
        batch, length, _ = hidden_states.shape
        shape = (batch, self.num_heads, length)
        dtype = torch.float64 if hidden_states.dtype == torch.float64 else torch.float32
        result = torch.full(shape, float(base), device=hidden_states.device, dtype=dtype)
        if growth:
            seen = (context.positions(length, hidden_states.device) + 1).to(dtype)
            result = result + growth * (2.0 * seen.log()).sqrt()[:, None, :]
        if margin:
            result = result + margin * (2.0 * torch.rand_like(result) if self.training else 1.0)
        if self.threshold_proj is not None:
            result = result + F.softplus(widened(self.threshold_proj(hidden_states))).transpose(1, 2)
        return result

    @property
    def is_fused(self) -> bool:
        """Whether the operator computes it."""
        return self.distance in ("contextual", "none") and self.option["removal"]

    def whole_map(self, q: Tensor, k: Tensor, hidden_states: Tensor, context: AttentionContext) -> AttentionMap | None:
        return super().whole_map(q, k, hidden_states, context) if self.is_fused else None

    def keeps(self, q: Tensor, k: Tensor, hidden_states: Tensor, context: AttentionContext) -> Tensor | None:
        return super().keeps(q, k, hidden_states, context) if self.option["removal"] else None

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        hidden_states: Tensor,
        context: AttentionContext,
        state: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        if self.is_fused:
            return super().attend(q, k, v, hidden_states, context)
        q = self.queries(q, k, context)
        key_bias = None
        if self.distance == "ordinary":
            key_bias = slope_bias(self.slopes, k, context)
        elif state is not None:
            key_bias = -cumulative_gates(state)
        threshold = self.all_thresholds(hidden_states, context)
        if not isinstance(threshold, Tensor):
            threshold = q.new_full((1, 1, q.shape[2]), threshold, dtype=widened(q).dtype)
        return threshold_variant_attention(
            q,
            k,
            v,
            self.visible_keys(q, context),
            threshold,
            log_decay=self.log_decay(hidden_states) if self.distance == "contextual" else None,
            key_bias=key_bias,
            query_bias=None if key_bias is None else context.of_own_keys(key_bias, q.shape[2]),
            removal=self.option["removal"],
            surrogate_width=self.surrogate_width if torch.is_grad_enabled() else None,
            scale=self.scale,
            dropout_p=self.dropout_p if self.training else 0.0,
            query_start=context.query_start,
            need_weights=context.output_attentions,
        )
