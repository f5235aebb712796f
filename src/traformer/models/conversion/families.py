"""The families that can be converted: for each a trunk and a language model class, known to transformers."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from traformer.models.card import converted_card
from traformer.models.conversion.configs import CONFIGS
from traformer.models.conversion.trunk import ConvertedTrunk
from traformer.models.exploring import ExploredModel
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


class ConvertedForCausalLM(SavedModel, CheckedGenerationMixin, ExploredModel):
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


def _named(made: type, name: str) -> Any:
    """The class under a name of this module, so that it can be pickled and looked up."""
    made.__name__ = made.__qualname__ = name
    made.__module__ = __name__
    setattr(sys.modules[__name__], name, made)
    return made


def _family(config: Any) -> Family:
    name = config.source_config.__name__.removesuffix("Config")
    source: Any = MODEL_FOR_CAUSAL_LM_MAPPING[config.source_config]
    names = {**config.trunk_names, "config_class": config}
    source_trunk: Any = MODEL_MAPPING[config.source_config]
    trunk = type("_", (ConvertedTrunk, source_trunk), names)
    trunk = _named(trunk, f"Traformer{name}Model")
    model = type("_", (ConvertedForCausalLM, source), {"config_class": config, "trunk_class": trunk})
    model = _named(model, f"Traformer{name}ForCausalLM")
    AutoModel.register(config, trunk, exist_ok=True)
    AutoModelForCausalLM.register(config, model, exist_ok=True)
    return Family(config.source_config.model_type, source, config, trunk, model)


FAMILIES: dict[str, Family] = {name: _family(config) for name, config in CONFIGS.items()}
