"""Named configurations: an attention and its options under one name, for the command line and for tables.

A name here is taken wherever a name in ATTENTIONS is; the model's own config then holds the attention and the options
that it stands for. To add one is one line.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class NamedConfiguration:
    """What a name stands for."""

    attention: str
    summary: str
    options: dict[str, Any] = field(default_factory=dict)
    qk_norm: bool | None = None  # None: as the model's config says


def _variant(summary: str, **options: Any) -> NamedConfiguration:
    return NamedConfiguration("tra_variant", summary, options)


ABLATIONS: dict[str, NamedConfiguration] = {
    "tra_threshold_only": _variant("TRA's threshold without distance: NoPE on the kept keys", distance="none"),
    "tra_distance_only": _variant(
        "TRA's contextual distance without removal: all keys stay in the softmax", removal=False
    ),
    "tra_ordinary_distance": _variant("TRA's threshold with ALiBi's distance on the kept keys", distance="ordinary"),
    "tra_forget_distance": _variant(
        "TRA's threshold with FoT's gates as distance on the kept keys", distance="forgetting"
    ),
    "tra_fixed_decay": _variant("TRA with a fixed decay for each head instead of the learned gate", decay="fixed"),
    "tra_no_qk_norm": NamedConfiguration("tra", "TRA without QK-norm", {}, qk_norm=False),
    "tra_threshold_half": NamedConfiguration("tra", "TRA with the threshold at 0.5", {"threshold": 0.5}),
    "tra_learned_threshold": _variant(
        "TRA with an input-adaptive threshold (straight-through)", learned_threshold=True
    ),
}

EXTENSIONS: dict[str, NamedConfiguration] = {
    "tra_exclude_self": NamedConfiguration(
        "tra", "TRA with the query's own key excluded in half of the heads", {"exclude_self": "half"}
    ),
    "tra_temperature": NamedConfiguration("tra", "TRA with a learned temperature for each head", {"temperature": True}),
    "tra_exclude_self_temperature": NamedConfiguration(
        "tra",
        "TRA with both: own key excluded in half of the heads, temperature",
        {"exclude_self": "half", "temperature": True},
    ),
    "tra_growing_threshold": _variant("TRA with a threshold that grows with length", threshold_growth=0.25),
    "tra_margin": _variant("TRA with a margin around the threshold, drawn in training", margin=0.25),
    "tra_slow_gate": _variant("TRA whose gate starts slow: 5 % a kept key", gate_bias=3.0),
    "tra_fast_gate": _variant("TRA whose gate starts fast: 88 % a kept key", gate_bias=-2.0),
    "tra_straight_through": _variant("TRA whose removed keys have a gradient in training", straight_through=True),
    "tra_plus": _variant(
        "TRA with a gradient for removed keys, own key excluded and fast gates in half of the heads, temperature",
        straight_through=True,
        exclude_self="half",
        gate_bias="halves",
        temperature=True,
    ),
}

PEER_VARIANTS: dict[str, NamedConfiguration] = {
    "sinusoidal_offset": NamedConfiguration(
        "sinusoidal", "sinusoidal positions, trained with random offsets", {"random_offset": 1024}
    ),
    "learned_offset": NamedConfiguration(
        "learned", "learned positions, trained with random offsets", {"random_offset": 1024}
    ),
    "rope_no_qk_norm": NamedConfiguration("rope", "RoPE without QK-norm", {}, qk_norm=False),
}

NAMED: dict[str, NamedConfiguration] = {**ABLATIONS, **EXTENSIONS, **PEER_VARIANTS}


def stands_for(attention: str, options: dict[str, Any]) -> tuple[str, dict[str, Any], bool | None]:
    """Attention, options and QK-norm (None: not its business) behind a name, itself if it is none of these.

    Options given beside a name win over its own.
    """
    named = NAMED.get(attention, NamedConfiguration(attention, ""))
    return named.attention, {**named.options, **options}, named.qk_norm
