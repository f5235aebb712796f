"""The families that can be converted: for each a config, a trunk and a language model class, known to transformers.

A converted model has a `model_type` of its own (traformer_llama, ...), so that transformers alone refuses it, where it
would else load the weights into another attention.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MistralConfig,
    MistralForCausalLM,
    MistralModel,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Model,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
)

from traformer.errors import InputError
from traformer.layers import check_stack
from traformer.methods import stack_of
from traformer.models.card import converted_card
from traformer.models.conversion.trunk import ConvertedTrunk
from traformer.models.generation import CheckedGenerationMixin
from traformer.models.saving import SavedModel


@dataclass(frozen=True)
class Family:
    """A source's classes, where its modules are, and the classes that conversion makes of them."""

    name: str
    source: type[PreTrainedModel]
    config: type[PretrainedConfig]
    trunk: type[PreTrainedModel]
    model: type[PreTrainedModel]


class ConvertedForCausalLM(SavedModel, CheckedGenerationMixin):
    """Mixed in before the language model class of a family: its head and forward around a converted trunk."""

    trunk_class: ClassVar[type[ConvertedTrunk]]

    def __init__(self, config: Any) -> None:
        PreTrainedModel.__init__(self, config)  # not the source's, which would build its own trunk
        setattr(self, self.base_model_prefix, self.trunk_class(config))
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def model_card(self, folder: str) -> str:
        return converted_card(self, folder)


def _config_class(source: type[PretrainedConfig], name: str) -> type[PretrainedConfig]:
    """The source's configuration and what attention layers of ours need to know."""

    class ConvertedConfig(source):  # type: ignore[valid-type, misc]
        model_type = f"traformer_{source.model_type}"
        attribute_map = {**source.attribute_map}  # noqa: RUF012

        attention: str | list[str] = "tra"
        attention_options: dict[str, Any] | list[dict[str, Any]] = field(default_factory=dict)
        qk_norm: bool | list[bool] = False  # True: ours, without a learned scale; False: as the source has it
        keep_positions: bool = False  # of a source that adds learned ones
        embedding_range: float = 0.02  # a uniform range with the root mean square of the token embeddings
        head_dim: int | None = None
        converted_from: str | None = None

        def __post_init__(self, **kwargs: Any) -> None:
            self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
            super().__post_init__(**kwargs)
            check_stack(self)
            for method in stack_of(self):
                if not method.has_weights:
                    raise InputError(
                        f"attention {method.name!r} has no queries and keys, so it cannot take over a model's weights"
                    )

    if source is GPT2Config:
        ConvertedConfig.attribute_map |= {"num_key_value_heads": "n_head", "attention_dropout": "attn_pdrop"}
    return _named(ConvertedConfig, name)


def _named(made: type, name: str) -> Any:
    """The class under a name of this module, so that it can be pickled and looked up."""
    made.__name__ = made.__qualname__ = name
    made.__module__ = __name__
    setattr(sys.modules[__name__], name, made)
    return made


def _family(
    source_config: type[PretrainedConfig],
    source_trunk: type[PreTrainedModel],
    source: type[PreTrainedModel],
    blocks: str = "layers",
    attention: str = "self_attn",
    norm: str = "norm",
) -> Family:
    name = source.__name__.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
    config = _config_class(source_config, f"Traformer{name}Config")
    names = {"blocks_name": blocks, "attention_name": attention, "norm_name": norm, "config_class": config}
    trunk = _named(type("_", (ConvertedTrunk, source_trunk), names), f"Traformer{name}Model")
    model = type("_", (ConvertedForCausalLM, source), {"config_class": config, "trunk_class": trunk})
    model = _named(model, f"Traformer{name}ForCausalLM")
    AutoConfig.register(config.model_type, config, exist_ok=True)
    AutoModel.register(config, trunk, exist_ok=True)
    AutoModelForCausalLM.register(config, model, exist_ok=True)
    return Family(source_config.model_type, source, config, trunk, model)


# A family whose blocks pass keywords on to their attention is one line here, and the shared tests pick it up.
FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        _family(LlamaConfig, LlamaModel, LlamaForCausalLM),
        _family(MistralConfig, MistralModel, MistralForCausalLM),
        _family(Qwen2Config, Qwen2Model, Qwen2ForCausalLM),
        _family(Qwen3Config, Qwen3Model, Qwen3ForCausalLM),
        _family(GPT2Config, GPT2Model, GPT2LMHeadModel, "h", "attn", "ln_f"),
    )
}
