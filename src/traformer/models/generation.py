"""What every model of ours adds to transformers' own generate, loading and saving."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from transformers import Cache, GenerationConfig, GenerationMixin
from transformers.generation import GenerationMode

from traformer.models.checks import check_memory, check_prompt
from traformer.types import JsonObject


class CheckedGenerationMixin(GenerationMixin):
    """transformers' generate, after a look at the prompt and at memory, with a cache that grows by doubling.

    For models whose trunk has `new_cache`.
    """

    config: Any
    dtype: Any
    device: Any
    base_model: Any

    def generate(self, inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        """transformers' generate, after a look at the prompt: what cannot be continued is said in one sentence."""
        prompt = kwargs.get("input_ids") if inputs is None else inputs
        if kwargs.get("inputs_embeds") is None:
            check_prompt(prompt, kwargs.get("attention_mask"), self.config.vocab_size)
        return super().generate(inputs, *args, **kwargs)  # type: ignore[misc]

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: JsonObject,
        generation_mode: GenerationMode,
        batch_size: int,
        max_cache_length: int,
    ) -> bool:
        """Where generate would make a stock dynamic cache, ours; and a word before memory runs out, not after."""
        if generation_config.use_cache:
            rows = batch_size * max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
            check_memory(self.config, rows, max_cache_length, self.dtype, self.device)
            stock = generation_config.cache_implementation in (None, "dynamic")
            if stock and model_kwargs.get("past_key_values") is None:
                model_kwargs["past_key_values"] = self.base_model.new_cache()
                return False
        return super()._prepare_cache_for_generation(  # type: ignore[misc]
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )

    @staticmethod
    def create_masks_for_generate(
        attention_mask: Tensor | None = None, past_key_values: Cache | None = None, **kwargs: Any
    ) -> Tensor | None:
        """Called by generate for caches that can be compiled: the 2-D mask at the cache's length, a fixed shape."""
        if attention_mask is None or past_key_values is None:
            return attention_mask
        return F.pad(attention_mask, (0, past_key_values.get_max_length() - attention_mask.shape[1]))
