"""The configuration of a Traformer decoder, and the sizes it is usually built in."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from dataclasses import field, fields
from typing import Any, ClassVar

from transformers import PretrainedConfig

from traformer.errors import InputError, unknown_name
from traformer.layers import check_stack
from traformer.methods import resolve_stack
from traformer.presets import PRESETS
from traformer.types import JsonObject

RESIDUALS = ("normed", "prenorm")


class TraformerConfig(PretrainedConfig):
    """A decoder-only transformer with any attention of ours.

    attention          a name of the catalogue (traformer.methods), or a list of them: one per layer, or a pattern that
                       repeats. For a named configuration, its method and options are stored
    attention_options  the method's own options; for a list of attentions a list, or a mapping from names to options
    hidden_size, num_hidden_layers, num_attention_heads   the usual sizes; head_dim defaults to hidden_size / heads
    num_key_value_heads  fewer key heads than query heads (grouped or multi-query attention); default: as many
    intermediate_size  inner width of the gated MLP, default 2 * hidden_size
    attention_dropout  on the weights, after the softmax;  hidden_dropout: on the embedding and inside the MLP
    qk_norm            RMS-normalise queries and keys per head, without a learned scale (a list: one for each layer)
    residual           "normed": the stream carries what the norm gave, as in the authors' decoder; "prenorm": the usual
    format_version     of the saved model; a newer one than this library knows is refused
    """

    model_type = "traformer"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    FORMAT_VERSION: ClassVar[int] = 1

    attention: str | list[str] = "tra"
    attention_options: JsonObject | list[JsonObject] = field(default_factory=dict)
    vocab_size: int = 256
    hidden_size: int = 256
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    qk_norm: bool | list[bool] = True
    residual: str = "normed"
    rms_norm_eps: float = 1e-6
    embedding_range: float = 0.01
    initializer_range: float = 0.02
    use_cache: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = False
    format_version: int = FORMAT_VERSION

    def __post_init__(self, **kwargs: Any) -> None:
        _refuse_misspelt(kwargs, [f.name for f in fields(self)])
        resolve_stack(self.attention, self.attention_options)  # a misspelt name is the first thing to be said
        if self.residual not in RESIDUALS:
            raise unknown_name("residual", self.residual, RESIDUALS)
        if self.format_version > self.FORMAT_VERSION:
            raise InputError(
                f"the model was saved in format {self.format_version}, but this version of traformer reads up to "
                f"{self.FORMAT_VERSION}; upgrade traformer"
            )
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
            _require_positive(name, getattr(self, name))
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        _require_positive("num_key_value_heads", self.num_key_value_heads)
        if self.num_attention_heads % self.num_key_value_heads:
            raise InputError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of num_key_value_heads "
                f"({self.num_key_value_heads})"
            )
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise InputError(
                    f"hidden_size ({self.hidden_size}) must be a multiple of num_attention_heads "
                    f"({self.num_attention_heads}), or set head_dim"
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        _require_positive("head_dim", self.head_dim)
        if self.intermediate_size is None:
            self.intermediate_size = 2 * self.hidden_size
        _require_positive("intermediate_size", self.intermediate_size)
        for name in ("attention_dropout", "hidden_dropout"):
            value = getattr(self, name)
            if not 0.0 <= value < 1.0:
                raise InputError(f"{name} must be in [0, 1), not {value}")
        for name in ("rms_norm_eps", "embedding_range", "initializer_range"):
            value = getattr(self, name)
            if not (isinstance(value, (int, float)) and 0.0 < value < math.inf):
                raise InputError(f"{name} must be a finite number above 0, not {value!r}")
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.vocab_size:
            raise InputError(
                f"pad_token_id ({self.pad_token_id}) must be below vocab_size ({self.vocab_size}), or None"
            )
        if self.tie_word_embeddings:
            raise InputError(
                "tie_word_embeddings is not supported: the output head is untied from the embedding; leave it out"
            )
        check_stack(self)
        super().__post_init__(**kwargs)

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> TraformerConfig:
        """A configuration of a known size ("tiny", "mini", "small", "medium"); any field can be overridden."""
        if name not in PRESETS:
            raise unknown_name("preset", name, PRESETS)
        return cls(**{**PRESETS[name], **overrides})


def _require_positive(name: str, value: int) -> None:
    if not (isinstance(value, int) and value > 0):
        raise InputError(f"{name} must be a positive whole number, not {value!r}")


def _refuse_misspelt(extra: Iterable[str], known: list[str]) -> None:
    """The base class takes any keyword and keeps it unused; one that looks like a field is a typing error."""
    for name in extra:
        nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        if nearest:
            raise InputError(f"unknown configuration field {name!r}; did you mean {nearest[0]!r}?")
