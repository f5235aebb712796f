"""Hugging Face models with any attention of ours. Importing this registers them with transformers' Auto classes."""

from __future__ import annotations

from traformer.versions import require

require("torch")
require("transformers")

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from traformer.models.authors import convert_authors_state_dict
from traformer.models.cache import TraformerCache
from traformer.models.causal_lm import TraformerForCausalLM
from traformer.models.config import PRESETS, TraformerConfig
from traformer.models.convert import convert
from traformer.models.decoder import TraformerModel

AutoConfig.register(TraformerConfig.model_type, TraformerConfig, exist_ok=True)
AutoModel.register(TraformerConfig, TraformerModel, exist_ok=True)
AutoModelForCausalLM.register(TraformerConfig, TraformerForCausalLM, exist_ok=True)

__all__ = [
    "PRESETS",
    "TraformerCache",
    "TraformerConfig",
    "TraformerForCausalLM",
    "TraformerModel",
    "convert",
    "convert_authors_state_dict",
]
