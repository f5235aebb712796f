"""The forward of a converted decoder: the source's embedding, blocks and norms around attention layers of ours."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.utils import logging

from traformer.errors import InputError
from traformer.layers import AttentionContext
from traformer.models.cache import TraformerCache
from traformer.models.checks import check_ids
from traformer.models.context import make_context
from traformer.models.conversion.attention import CONVERTED_ATTENTIONS, ConvertedAttention
from traformer.models.decoder import _packing_keyword

logger = logging.get_logger(__name__)


class ConvertedTrunk(PreTrainedModel):
    """Mixed in before the trunk class of a family."""

    config: Any
    wpe: nn.Embedding  # in GPT-2, where its positions are kept
    drop: nn.Module  # in GPT-2
    blocks_name: ClassVar[str]
    attention_name: ClassVar[str]
    norm_name: ClassVar[str]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for index, block in enumerate(self.blocks):
            layer = CONVERTED_ATTENTIONS[config.attention](config, index)
            layer.take_over(getattr(block, self.attention_name), config)
            setattr(block, self.attention_name, layer)
        self.drop_positions()
        self.post_init()

    @property
    def blocks(self) -> Any:
        return getattr(self, self.blocks_name)

    @property
    def attention_layers(self) -> list[ConvertedAttention]:
        return [getattr(block, self.attention_name) for block in self.blocks]

    def drop_positions(self) -> None:
        """Remove what told the source's blocks where a token stands."""
        if hasattr(self, "rotary_emb"):
            del self.rotary_emb
        if hasattr(self, "wpe") and not self.config.keep_positions:
            del self.wpe

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, ConvertedAttention):  # after its children
            module.start_added()

    def new_cache(self) -> TraformerCache:
        """An empty cache that grows with what it is given."""
        return TraformerCache(self.config)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPastAndCrossAttentions | tuple:
        """As TraformerForCausalLM.forward, without the head."""
        if (input_ids is None) == (inputs_embeds is None):
            raise InputError("give exactly one of input_ids and inputs_embeds")
        for name in ("token_type_ids", "encoder_hidden_states"):
            if kwargs.get(name) is not None:
                raise InputError(f"a converted model takes no {name}")
        cu_seqlens = _packing_keyword(cu_seqlens, kwargs)
        use_cache = self.config.use_cache and not self.training if use_cache is None else use_cache
        if use_cache and self.training and self.is_gradient_checkpointing:
            logger.warning_once("a cache cannot be kept under gradient checkpointing; going on with use_cache=False")
            use_cache, past_key_values = False, None
        output_attentions = self.config.output_attentions if output_attentions is None else output_attentions
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if input_ids is not None and input_ids.device.type == "cpu" and not torch.compiler.is_compiling():
            check_ids(input_ids, self.config.vocab_size)
        x = self.get_input_embeddings()(input_ids) if inputs_embeds is None else inputs_embeds
        new_cache = self.new_cache if use_cache else None
        context, real = make_context(
            x, attention_mask, position_ids, cu_seqlens, past_key_values, new_cache, bool(output_attentions)
        )
        first = self.attention_layers[0]
        x = self.embed_positions(first.embed(x, context), context)
        if real is not None:  # what stands at padded places, NaN included, can change nothing
            x = x.masked_fill(~real[..., None], 0.0)
        if hasattr(self, "drop"):
            x = self.drop(x)
        context.shared = first.prepare(context, x)
        hidden_states: list[Tensor] = []
        collected: dict[int, Tensor | None] | None = {} if output_attentions else None
        for block in self.blocks:
            if output_hidden_states:
                hidden_states.append(x)
            x = block(x, context=context, collected=collected)
        x = getattr(self, self.norm_name)(x)
        if output_hidden_states:
            hidden_states.append(x)
        output = BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=x,
            past_key_values=context.past_key_values,
            hidden_states=tuple(hidden_states) if output_hidden_states else None,  # type: ignore[arg-type]
            attentions=None if collected is None else tuple(collected[i] for i in sorted(collected)),  # type: ignore[misc]
        )
        return output if return_dict or return_dict is None else output.to_tuple()

    def embed_positions(self, x: Tensor, context: AttentionContext) -> Tensor:
        """Add the source's learned positions, where they were kept."""
        if not self.config.keep_positions:
            return x
        positions = context.positions(x.shape[1], x.device)
        rows = self.wpe.num_embeddings
        if not torch.compiler.is_compiling() and int(positions.max()) >= rows:
            raise InputError(
                f"position {int(positions.max())} is beyond the model's {rows} learned positions; "
                "convert without keep_positions to go farther"
            )
        return x + self.wpe(positions)
