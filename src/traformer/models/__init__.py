"""Hugging Face models with any attention of ours. Importing this registers them with transformers' Auto classes."""

from __future__ import annotations

from traformer.versions import require

require("torch")
require("transformers")

from typing import TYPE_CHECKING, Any

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import traformer.models.conversion.configs  # noqa: F401  # registers converted models
from traformer.models.authors import convert_authors_state_dict
from traformer.models.cache import TraformerCache
from traformer.models.causal_lm import TraformerForCausalLM
from traformer.models.config import PRESETS, TraformerConfig
from traformer.models.decoder import TraformerModel

AutoConfig.register(TraformerConfig.model_type, TraformerConfig, exist_ok=True)
AutoModel.register(TraformerConfig, TraformerModel, exist_ok=True)
AutoModelForCausalLM.register(TraformerConfig, TraformerForCausalLM, exist_ok=True)

if TYPE_CHECKING:
    from traformer.models.conversion.convert import convert

__all__ = [
    "PRESETS",
    "TraformerCache",
    "TraformerConfig",
    "TraformerForCausalLM",
    "TraformerModel",
    "convert",
    "convert_authors_state_dict",
]


def __getattr__(name: str) -> Any:
    if name == "convert":  # loads the families that can be converted
        from traformer.models.conversion.convert import convert

        return convert
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
