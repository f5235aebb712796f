"""Configurations of converted models: the source's, and what attention layers of ours need to know.

A converted model has a `model_type` of its own (traformer_llama, ...), so that transformers alone refuses it, where it
would else load the weights into another attention. The model classes are loaded, and made known to transformers, when
the first configuration is made.
"""

from __future__ import annotations

import sys
from dataclasses import field
from importlib import import_module
from typing import Any, ClassVar

from transformers import (
    AutoConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from traformer.errors import InputError
from traformer.layers import check_stack
from traformer.methods import stack_of
from traformer.types import JsonObject


def _config_class(source: type[PretrainedConfig], names: dict[str, str]) -> type[PretrainedConfig]:
    """Given what a trunk of the source calls its blocks, a block's attention and the final norm."""

    class ConvertedConfig(source):  # type: ignore[valid-type, misc]
        model_type = f"traformer_{source.model_type}"
        attribute_map = {**source.attribute_map}  # noqa: RUF012
        source_config: ClassVar[type[PretrainedConfig]] = source
        trunk_names: ClassVar[dict[str, str]] = names

        attention: str | list[str] = "tra"
        attention_options: JsonObject | list[JsonObject] = field(default_factory=dict)
        qk_norm: bool | list[bool] = False  # True: ours, without a learned scale; False: as the source has it
        keep_positions: bool = False  # of a source that adds learned ones
        embedding_range: float = 0.02  # a uniform range with the root mean square of the token embeddings
        head_dim: int | None = None
        converted_from: str | None = None

        def __post_init__(self, **kwargs: Any) -> None:
            import_module("traformer.models.conversion.families")  # a model is made from the configuration next
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
    name = f"Traformer{source.__name__}"
    ConvertedConfig.__name__ = ConvertedConfig.__qualname__ = name
    ConvertedConfig.__module__ = __name__
    setattr(sys.modules[__name__], name, ConvertedConfig)  # so that it can be pickled and looked up
    AutoConfig.register(ConvertedConfig.model_type, ConvertedConfig, exist_ok=True)
    return ConvertedConfig


_USUAL = {"blocks_name": "layers", "attention_name": "self_attn", "norm_name": "norm"}
# A family whose blocks pass keywords on to their attention is one line here, and the shared tests pick it up.
CONFIGS: JsonObject = {
    LlamaConfig.model_type: _config_class(LlamaConfig, _USUAL),
    MistralConfig.model_type: _config_class(MistralConfig, _USUAL),
    Qwen2Config.model_type: _config_class(Qwen2Config, _USUAL),
    Qwen3Config.model_type: _config_class(Qwen3Config, _USUAL),
    GPT2Config.model_type: _config_class(
        GPT2Config, {"blocks_name": "h", "attention_name": "attn", "norm_name": "ln_f"}
    ),
}
