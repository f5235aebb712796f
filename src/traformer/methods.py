"""The catalogue: every attention method and named configuration, what it is called, and what it can do.

Free of torch, so that commands can check and list names before anything heavy is loaded. A new method is one entry
here, one layer in `traformer.layers` and one op in `traformer.ops`; everything else (models, conversion, memory
estimates, stretch, reports, `tra list`, the shared tests) reads this catalogue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypedDict

from traformer.errors import InputError, unknown_name
from traformer.types import JsonObject, Options

# How a method is computed: by TRA's fused operator, by torch's fused attention, in plain torch, or step by step.
OPERATOR, TORCH, EAGER, RECURRENCE = "operator", "torch", "eager", "recurrence"
# What a name is for: TRA itself, another method, TRA with parts replaced or added, a peer with other options.
TRA, PEER, SKYLINE, ABLATION, EXTENSION, PEER_VARIANT = "tra", "peer", "skyline", "ablation", "extension", "variant"
# The recipe `tra_plus` with one part left out, and peers with what the recipe gives to any method.
LEFT_OUT, EQUAL_RECIPE = "left out", "equal recipe"


class Option(NamedTuple):
    """An option of a method."""

    default: Any
    help: str


class Abilities(TypedDict, total=False):
    """The fields of a Method that may depend on its options."""

    path: str
    reads_all_keys: bool
    writes_square: bool
    map_floats: int
    pair_floats: int
    keys_carry_position: bool
    gate: str | None


@dataclass(frozen=True)
class Method:
    """A method with its options. What it can do holds for exactly these options."""

    name: str
    layer: str  # where its layer is: "module:Class"
    label: str  # how tables and plots write it
    summary: str
    kind: str = PEER
    attention: str = ""  # the method that a named configuration configures; its own name otherwise
    option_table: Mapping[str, Option] = field(default_factory=dict, repr=False)
    options: Options = field(default_factory=dict)  # those that differ from the defaults on purpose
    qk_norm: bool | None = None  # None: as the model's config says
    path: str = TORCH
    reads_all_keys: bool = True  # every query reads every key before it
    writes_square: bool = False  # a T x T mask or bias is held in memory
    # Where attention maps are made: numbers that training keeps per layer for each head, query and key (measured), and
    # for each query and key whatever the heads. Eager methods make the maps of a block of queries at a time.
    map_floats: int = 6
    pair_floats: int = 0
    keys_carry_position: bool = False  # a cached key depends on its place, so caches cannot be cut and joined
    gate: str | None = None  # the Linear whose logsigmoid is a decay per head; None: there is none
    has_weights: bool = True  # it weighs keys, so `output_attentions` and conversion make sense
    # Given all options, the abilities that depend on them.
    abilities: Callable[[Options], Abilities] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "attention", self.attention or self.name)
        object.__setattr__(self, "options", MappingProxyType(dict(self.options)))
        if self.abilities is not None:
            for name, value in self.abilities(self.all_options).items():
                object.__setattr__(self, name, value)

    @property
    def all_options(self) -> JsonObject:
        """Every option with its value, defaults included."""
        return {name: option.default for name, option in self.option_table.items()} | dict(self.options)

    @property
    def is_configuration(self) -> bool:
        """Whether the name is one for another method's options."""
        return self.name != self.attention

    @property
    def is_tra(self) -> bool:
        """Whether it is TRA, as published or with parts replaced."""
        return METHODS[self.attention].kind == TRA

    @property
    def fused(self) -> bool:
        """Whether a fused kernel computes it."""
        return self.path in (OPERATOR, TORCH)

    @property
    def recurrent(self) -> bool:
        return self.path == RECURRENCE

    @property
    def has_gates(self) -> bool:
        return self.gate is not None

    def is_same(self, other: Method) -> bool:
        """Whether the other is the same method with the same options, whatever they are called."""
        return self.attention == other.attention and self.all_options == other.all_options

    def with_options(self, options: Options) -> Method:
        """The same method with these options over its own; an option that it does not have is an error."""
        unknown = sorted(set(options) - set(self.option_table))
        if unknown:
            known = ", ".join(self.option_table) or "none"
            raise InputError(
                f"attention_options has {unknown[0]!r}, unknown to attention {self.name!r}; its options: {known}"
            )
        return replace(self, options={**self.options, **options})


def resolve_method(name: str, options: Options | None = None) -> Method:
    """The method or named configuration of that name, with `options` over its own."""
    if name not in METHODS:
        raise unknown_name("attention", name, METHODS)
    return METHODS[name].with_options(options or {})


def resolve_stack(
    attention: str | Sequence[str], options: Options | Sequence[Options] | None = None, layers: int | None = None
) -> list[Method]:
    """The methods of a stack, one per layer; without `layers`, those of its repeating pattern.

    attention  one name for all layers, or several (a list, or with commas between): one per layer, or a pattern that
               repeats
    options    of one name: its options. Of several: a list, one entry for each, or a mapping from names to options
    """
    names = attention.split(",") if isinstance(attention, str) else list(attention)
    names = [name.strip() if isinstance(name, str) else name for name in names]
    if len(names) == 1 and isinstance(options, Sequence):
        names = names * len(options)
    methods = [
        resolve_method(name, given) for name, given in zip(names, _options_by_place(names, options or {}), strict=True)
    ]
    if not methods:
        raise InputError("attention is an empty list; give one name for all layers, or one per layer")
    if layers is None:
        return methods
    if layers % len(methods):
        raise InputError(
            f"attention has {len(methods)} names for {layers} layers; give one per layer, or a pattern that fits a "
            "whole number of times"
        )
    return methods * (layers // len(methods))


def _options_by_place(names: Sequence[str], options: Options | Sequence[Options]) -> Sequence[Options]:
    """The options of each name of a stack."""
    if not isinstance(options, Mapping):
        if len(options) != len(names):
            raise InputError(
                f"attention_options has {len(options)} entries and attention {len(names)}; give as many of each"
            )
        return options
    if len(names) == 1:
        return [options]
    for name, given in options.items():
        if name not in names or not isinstance(given, Mapping):
            raise InputError(
                f"attention_options has {name!r}; with several attentions it is a list with one entry for each, or "
                f"maps their names ({', '.join(dict.fromkeys(names))}) to their options"
            )
    return [options.get(name, {}) for name in names]


class StackConfig(Protocol):
    """What the catalogue reads of a model's configuration: ours, or that of a converted model."""

    @property
    def attention(self) -> str | list[str]: ...
    @property
    def attention_options(self) -> JsonObject | list[JsonObject]: ...
    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def qk_norm(self) -> bool | list[bool] | None: ...


def stack_of(config: StackConfig) -> list[Method]:
    """The methods of a model's layers, QK-norm included, from its configuration."""
    methods = resolve_stack(config.attention, config.attention_options, config.num_hidden_layers)
    norms = config.qk_norm if isinstance(config.qk_norm, list) else [config.qk_norm] * len(methods)
    return [
        replace(method, qk_norm=norm if method.qk_norm is None else method.qk_norm)
        for method, norm in zip(methods, norms, strict=True)
    ]


def store_stack(config: Any) -> None:  # a StackConfig that can be written to
    """Write the methods of the configured names into a model's configuration: one value, or a list of one per layer."""
    stack = stack_of(config)
    alike = all(method.is_same(stack[0]) and method.qk_norm == stack[0].qk_norm for method in stack)
    one = stack[0]
    config.attention = one.attention if alike else [method.attention for method in stack]
    config.attention_options = dict(one.options) if alike else [dict(method.options) for method in stack]
    config.qk_norm = one.qk_norm if alike else [method.qk_norm for method in stack]


def label_of(attention: str) -> str:
    """How tables and plots write an attention; a name that is not in the catalogue is written as it is."""
    names = [name.strip() for name in attention.split(",")]
    return " + ".join(METHODS[name].label if name in METHODS else name for name in names)


def names_of_kind(*kinds: str) -> list[str]:
    """The names of these kinds, in the catalogue's order."""
    return [method.name for method in METHODS.values() if method.kind in kinds]


_TEMPERATURE = {"temperature": Option(False, "a learned factor per head on the scores")}
_EXCLUDE_SELF = {
    "exclude_self": Option(False, 'leave out the query\'s own key: true, "half" (of the heads) or a list of bool')
}
_PREVIOUS = {
    "previous_heads": Option(
        False, 'heads that read the previous token alone: true, "half" (the first) or a list of bool'
    )
}
_WINDOW = {"sliding_window": Option(None, "w: a query sees its own key and the w - 1 before it")}
_SINKS = {"sinks": Option(0, "with sliding_window: so many first keys of the sequence stay visible")}
_GATE_BIAS = {
    "gate_bias": Option(None, 'where the gate\'s bias starts: a number, one per head, or "halves" (-6 and 6)')
}
_SOFTMAX = {**_TEMPERATURE, **_EXCLUDE_SELF, **_PREVIOUS, **_WINDOW}
_ROTARY = {
    "position": Option("rope", '"rope" or "none"'),
    "theta": Option(500_000.0, "base of the rotary embedding"),
}
_OFFSET = {"random_offset": Option(0, "in training a sequence starts at a position drawn from 0 .. this")}
_TRA = {
    "threshold": Option(0.0, "a key is kept if it scores above this (>= 0)"),
    **_EXCLUDE_SELF,
    **_PREVIOUS,
    **_TEMPERATURE,
    "tolerance": Option(2.0**-24, "share of a row's weight that the early exit may drop; 0 reads every key"),
    "backend": Option("auto", "which kernel computes it"),
}
_TRA_VARIANT = {
    **_TRA,
    "distance": Option("contextual", '"contextual", "ordinary", "forgetting" or "none"'),
    "removal": Option(True, "false: no key is removed, distance counts those above the threshold"),
    "decay": Option("gate", '"gate" (learned) or "fixed" (ALiBi\'s slope of the head)'),
    **_GATE_BIAS,
    "threshold_growth": Option(0.0, "a: the n-th token's threshold grows by a * sqrt(2 log n)"),
    "margin": Option(0.0, "m: in training the threshold is drawn from [0, 2m] above its value, else m above it"),
    "sharpening": Option(None, "p: the n-th token's scores times n^p, p learned for each head from this start"),
    "straight_through": Option(False, "removed keys have a gradient in training"),
    "learned_threshold": Option(False, "an input-adaptive threshold, trained with straight_through"),
}


def _variant_abilities(options: Options) -> Abilities:
    """TRA's variants: the operator serves contextual or no distance with removal, the rest is eager."""
    served = options["distance"] in ("contextual", "none") and options["removal"]
    gated = options["distance"] in ("contextual", "forgetting") and options["decay"] == "gate"
    return {
        "path": OPERATOR if served else EAGER,
        "reads_all_keys": not served,
        "writes_square": not served,
        "map_floats": 10,
        "gate": "decay_proj" if gated else None,
    }


def _softmax_abilities(options: Options) -> Abilities:
    """Softmax methods: a window is read alone, whatever the length."""
    return {"reads_all_keys": options["sliding_window"] is None}


def _fire_abilities(options: Options) -> Abilities:
    return {**_softmax_abilities(options), "pair_floats": 2 * options["hidden"]}  # the MLP's hidden layer, twice


def _rotary_abilities(options: Options) -> Abilities:
    return {**_softmax_abilities(options), "keys_carry_position": options["position"] == "rope"}


def _forgetting_abilities(options: Options) -> Abilities:
    """Gates prune far keys, where every head sees its own key."""
    all_see_own = options["exclude_self"] is False and options["previous_heads"] is False
    pruned = options["tolerance"] > 0 and all_see_own
    return {"reads_all_keys": options["sliding_window"] is None and not pruned}


_METHODS = (
    Method(
        "tra",
        "traformer.layers.threshold_relative:ThresholdRelativeAttention",
        "TRA",
        "Threshold Relative Attention as published: keys above a threshold, distance counted among the kept ones.",
        TRA,
        option_table=_TRA,
        path=OPERATOR,
        reads_all_keys=False,
        gate="decay_proj",
    ),
    Method(
        "rope",
        "traformer.layers.rope:RotaryAttention",
        "RoPE",
        "Softmax attention on rotated queries and keys.",
        option_table={"theta": _ROTARY["theta"], **_SOFTMAX, **_SINKS},
        keys_carry_position=True,
        abilities=_softmax_abilities,
    ),
    Method(
        "nope",
        "traformer.layers.nope:NoPositionAttention",
        "NoPE",
        "Softmax attention without any position embedding: order is known from the causal mask alone.",
        option_table=_SOFTMAX,
        abilities=_softmax_abilities,
    ),
    Method(
        "sinusoidal",
        "traformer.layers.absolute:SinusoidalAttention",
        "sinusoidal",
        "Softmax attention with sinusoidal absolute positions added to the token embeddings.",
        option_table={**_OFFSET, **_SOFTMAX},
        keys_carry_position=True,
        abilities=_softmax_abilities,
    ),
    Method(
        "learned",
        "traformer.layers.absolute:LearnedPositionAttention",
        "learned",
        "Softmax attention with a learned vector for each absolute position added to the token embeddings.",
        option_table={
            "max_positions": Option(4096, "rows of the table; a longer input is an error"),
            **_OFFSET,
            **_SOFTMAX,
        },
        keys_carry_position=True,
        abilities=_softmax_abilities,
    ),
    Method(
        "alibi",
        "traformer.layers.alibi:AlibiAttention",
        "ALiBi",
        "Softmax attention with a penalty proportional to distance, one fixed slope per head.",
        option_table=_SOFTMAX,
        abilities=_softmax_abilities,
    ),
    Method(
        "t5",
        "traformer.layers.t5:T5BiasAttention",
        "T5",
        "Softmax attention with T5's learned bias for each head and bucket of distances, shared by all layers.",
        option_table={
            "buckets": Option(32, "buckets of distances, half of them exact"),
            "max_distance": Option(128, "where the last bucket begins"),
            **_SOFTMAX,
        },
        writes_square=True,
        abilities=_softmax_abilities,
    ),
    Method(
        "fire",
        "traformer.layers.fire:FireAttention",
        "FIRE",
        "Softmax attention with a learned function of relative distance that interpolates between lengths.",
        option_table={
            "hidden": Option(32, "width of the MLP that makes the bias"),
            "init_length": Option(512.0, "where the learned length L starts"),
            **_SOFTMAX,
        },
        writes_square=True,
        abilities=_fire_abilities,
    ),
    Method(
        "cope",
        "traformer.layers.cope:ContextualPositionAttention",
        "CoPE",
        "Softmax attention whose positions count gated keys: contextual position encoding.",
        option_table={"npos_max": Option(64, "rows of the table of positions")},
        path=EAGER,
        writes_square=True,
        map_floats=20,
    ),
    Method(
        "fot",
        "traformer.layers.forgetting:ForgettingAttention",
        "FoT",
        "Softmax attention with a forget gate: the bias sums the log gates of every token between query and key.",
        option_table={
            **_GATE_BIAS,
            "tolerance": Option(2.0**-24, "share of a row's weight that pruning may drop; 0: none"),
            **_SOFTMAX,
        },
        gate="forget_proj",
        abilities=_forgetting_abilities,
    ),
    Method(
        "stick_breaking",
        "traformer.layers.stick_breaking:StickBreakingAttention",
        "stick-breaking",
        "Stick-breaking instead of softmax: the nearest keys choose their share first, so recency needs no position.",
        option_table={
            "remainder": Option("none", 'what is left of the stick: "none" drops it, "self" keeps it'),
            **_TEMPERATURE,
            **_WINDOW,
        },
        path=EAGER,
        writes_square=True,
        abilities=_softmax_abilities,
        map_floats=17,
    ),
    Method(
        "selective",
        "traformer.layers.selective:SelectiveAttention",
        "selective",
        "Softmax attention in which tokens mask keys for the tokens after them, with RoPE.",
        option_table=_ROTARY,
        path=EAGER,
        writes_square=True,
        keys_carry_position=True,  # without RoPE too: the first token of a sequence is never masked
        map_floats=11,
    ),
    Method(
        "ssmax",
        "traformer.layers.ssmax:ScalableSoftmaxAttention",
        "SSMax",
        "Softmax whose sharpness grows with the logarithm of the number of keys, with RoPE.",
        option_table={"init_scale": Option(0.168, "where the factor on log n starts"), **_ROTARY, **_SOFTMAX},
        abilities=_rotary_abilities,
    ),
    Method(
        "asentmax",
        "traformer.layers.asentmax:AdaptiveEntmaxAttention",
        "ASEntmax",
        "1.5-entmax with a learned, length-dependent sharpness; ALiBi in half of the heads, no position in the others.",
        option_table={"gamma_range": Option(2.0, "largest exponent of log n")},
        path=EAGER,
        writes_square=True,
        map_floats=8,
    ),
    Method(
        "differential",
        "traformer.layers.differential:DifferentialAttention",
        "differential",
        "The difference of two softmax attentions over the two halves of each head's channels, with RoPE.",
        option_table={**_ROTARY, **_SOFTMAX},
        abilities=_rotary_abilities,
        map_floats=10,
    ),
    Method(
        "lstm",
        "traformer.layers.lstm:LSTMLayer",
        "LSTM",
        "An LSTM of equal size in place of attention: a skyline, not a peer (no keys, no weights to look at).",
        SKYLINE,
        path=RECURRENCE,
        reads_all_keys=False,
        keys_carry_position=True,
        has_weights=False,
    ),
    Method(
        "tra_variant",
        "traformer.layers.threshold_variants:ThresholdVariantAttention",
        "tra_variant",
        "TRA with parts replaced: which keys stay, how distance is counted, how it decays.",
        TRA,
        option_table=_TRA_VARIANT,
        abilities=_variant_abilities,
    ),
)
METHODS: dict[str, Method] = {method.name: method for method in _METHODS}


def _name(
    kind: str, name: str, attention: str, summary: str, *, label: str = "", qk_norm: bool | None = None, **options: Any
) -> None:
    """Add a named configuration: a method with options under a name of its own."""
    configured = METHODS[attention].with_options(options)
    METHODS[name] = replace(
        configured, name=name, attention=attention, label=label or name, summary=summary, kind=kind, qk_norm=qk_norm
    )


_name(
    ABLATION, "tra_threshold_only", "tra_variant", "TRA's threshold without distance: NoPE on the kept keys",
    distance="none",
)  # fmt: skip
_name(
    ABLATION, "tra_distance_only", "tra_variant",
    "TRA's contextual distance without removal: all keys stay in the softmax", removal=False,
)  # fmt: skip
_name(
    ABLATION, "tra_ordinary_distance", "tra_variant", "TRA's threshold with ALiBi's distance on the kept keys",
    distance="ordinary",
)  # fmt: skip
_name(
    ABLATION, "tra_forget_distance", "tra_variant", "TRA's threshold with FoT's gates as distance on the kept keys",
    distance="forgetting",
)  # fmt: skip
_name(
    ABLATION, "tra_fixed_decay", "tra_variant", "TRA with a fixed decay for each head instead of the learned gate",
    decay="fixed",
)  # fmt: skip
_name(ABLATION, "tra_no_qk_norm", "tra", "TRA without QK-norm", qk_norm=False)
_name(ABLATION, "tra_threshold_half", "tra", "TRA with the threshold at 0.5", threshold=0.5)
_name(
    ABLATION, "tra_learned_threshold", "tra_variant", "TRA with an input-adaptive threshold (straight-through)",
    learned_threshold=True,
)  # fmt: skip

_name(
    EXTENSION, "tra_exclude_self", "tra", "TRA with the query's own key excluded in half of the heads",
    exclude_self="half",
)  # fmt: skip
_name(EXTENSION, "tra_temperature", "tra", "TRA with a learned temperature for each head", temperature=True)
_name(
    EXTENSION, "tra_exclude_self_temperature", "tra",
    "TRA with both: own key excluded in half of the heads, temperature", exclude_self="half", temperature=True,
)  # fmt: skip
_name(
    EXTENSION, "tra_growing_threshold", "tra_variant", "TRA with a threshold that grows with length",
    threshold_growth=0.25,
)  # fmt: skip
_name(EXTENSION, "tra_margin", "tra_variant", "TRA with a margin around the threshold, drawn in training", margin=0.25)
_name(
    EXTENSION, "tra_sharpening", "tra_variant", "TRA whose scores grow with length: times n^p, p learned from 0",
    sharpening=0.0,
)  # fmt: skip
_name(EXTENSION, "tra_slow_gate", "tra_variant", "TRA whose gate starts slow: 5 % per kept key", gate_bias=3.0)
_name(EXTENSION, "tra_fast_gate", "tra_variant", "TRA whose gate starts fast: 88 % per kept key", gate_bias=-2.0)
_name(
    EXTENSION, "tra_straight_through", "tra_variant", "TRA whose removed keys have a gradient in training",
    straight_through=True,
)  # fmt: skip
_name(
    EXTENSION, "tra_plus", "tra_variant",
    "TRA with a gradient for removed keys, own key excluded and fast gates in half of the heads, temperature",
    straight_through=True, exclude_self="half", gate_bias="halves", temperature=True,
)  # fmt: skip
_name(
    EXTENSION, "tra_far", "tra_variant",
    "for upper layers, above tra_plus: a gradient for removed keys, gates that start to forget 0.0045 % per kept key, "
    "temperature", straight_through=True, gate_bias=10.0, temperature=True,
)  # fmt: skip

_name(
    EXTENSION, "tra_previous", "tra_variant",
    "tra_plus in which the first half of the heads read the previous token alone",
    straight_through=True, previous_heads="half", gate_bias="halves", temperature=True,
)  # fmt: skip

_RECIPE = METHODS["tra_plus"].options
_LEFT_OUT: dict[str, tuple[str, Options]] = {
    "tra_plus_no_removal": (
        "tra_plus without removal: same heads, gates and temperature, all keys in the softmax",
        {"removal": False, "straight_through": False},  # nothing is removed, so no surrogate gradient is needed
    ),
    "tra_plus_no_surrogate": ("tra_plus whose removed keys have no gradient", {"straight_through": False}),
    "tra_plus_own_key": ("tra_plus in which every head sees the query's own key", {"exclude_self": False}),
    "tra_plus_one_gate": ("tra_plus whose gates all start as in TRA", {"gate_bias": None}),
    "tra_plus_no_temperature": ("tra_plus without the temperature", {"temperature": False}),
}
for _left_out, (_summary, _changes) in _LEFT_OUT.items():
    _name(LEFT_OUT, _left_out, "tra_variant", _summary, **{**_RECIPE, **_changes})

_HEADS: Options = {"exclude_self": "half", "temperature": True}
_name(
    EQUAL_RECIPE, "rope_equal", "rope",
    "RoPE with tra_plus's recipe: own key excluded in half of the heads, temperature", **_HEADS,
)  # fmt: skip
_name(
    EQUAL_RECIPE, "alibi_equal", "alibi",
    "ALiBi with tra_plus's recipe: own key excluded in half of the heads, temperature", **_HEADS,
)  # fmt: skip
_name(
    EQUAL_RECIPE, "fot_equal", "fot",
    "FoT with tra_plus's recipe: own key excluded and fast gates in half of the heads, temperature", **_HEADS,
    gate_bias="halves",
)  # fmt: skip
_name(
    EQUAL_RECIPE, "fot_previous", "fot",
    "FoT with tra_previous's recipe: the first half of the heads read the previous token alone, temperature",
    previous_heads="half", gate_bias="halves", temperature=True,
)  # fmt: skip
_name(
    EQUAL_RECIPE, "fot_far", "fot",
    "FoT with tra_far's recipe, for upper layers: gates that start to forget 0.0045 % per key, temperature",
    gate_bias=10.0, temperature=True,
)  # fmt: skip
_name(
    EQUAL_RECIPE, "stick_breaking_equal", "stick_breaking",
    "stick-breaking with what it lacks of tra_plus's recipe: temperature (it never sees its own key)", temperature=True,
)  # fmt: skip

_name(PEER_VARIANT, "rope_window", "rope", "RoPE with a sliding window of 128 keys", sliding_window=128)
_name(
    PEER_VARIANT, "previous_token", "nope",
    "for the layer below tra_far: a softmax over two keys, of which half of the heads see the previous one alone; "
    "temperature", sliding_window=2, exclude_self="half", temperature=True,
)  # fmt: skip
_name(
    PEER_VARIANT, "sinusoidal_offset", "sinusoidal", "sinusoidal positions, trained with random offsets",
    random_offset=1024,
)  # fmt: skip
_name(
    PEER_VARIANT, "learned_offset", "learned", "learned positions, trained with random offsets", random_offset=1024
)  # fmt: skip
_name(PEER_VARIANT, "rope_no_qk_norm", "rope", "RoPE without QK-norm", qk_norm=False)
