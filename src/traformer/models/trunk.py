"""Tokens to hidden states: what our own decoder and every converted one have in common."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import ModelOutput, logging

from traformer.errors import InputError
from traformer.layers import AttentionContext, AttentionLayer
from traformer.layers.context import make_context
from traformer.models.cache import TraformerCache
from traformer.models.checks import check_ids
from traformer.types import Options

logger = logging.get_logger(__name__)


class Trunk(PreTrainedModel):
    """Embedding, blocks and final norm around attention layers of ours. What differs between decoders is a method."""

    config: Any
    leaders: list[int]  # what find_leaders found when the blocks were made
    output_class: ClassVar[type[ModelOutput]] = BaseModelOutputWithPast

    @property
    def blocks(self) -> nn.ModuleList:
        raise NotImplementedError

    @property
    def final_norm(self) -> nn.Module:
        raise NotImplementedError

    def attention_of(self, block: nn.Module) -> AttentionLayer:
        raise NotImplementedError

    @property
    def attention_layers(self) -> list[AttentionLayer]:
        return [self.attention_of(block) for block in self.blocks]

    def find_leaders(self) -> list[int]:
        """The first layer of each method and options: it prepares what the others of its kind also use."""
        return sorted({layer.leader for layer in self.attention_layers})

    def check_keywords(self, keywords: Options) -> None:
        """Refuse what forward was given and this decoder cannot honour."""

    def embed(self, x: Tensor, context: AttentionContext) -> Tensor:
        """Token embeddings [B, T, E] and what the attention adds to them."""
        for leader in self.leaders:
            x = self.attention_of(self.blocks[leader]).embed(x, context)
        return x

    def drop_embeddings(self, x: Tensor) -> Tensor:
        return x

    def run_block(self, block: nn.Module, x: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor | None]:
        """x [B, T, E] -> x [B, T, E], attention weights [B, H, T, Tk] or None."""
        raise NotImplementedError

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
    ) -> Any:
        """As TraformerForCausalLM.forward, without the head."""
        if (input_ids is None) == (inputs_embeds is None):
            raise InputError("give exactly one of input_ids and inputs_embeds")
        self.check_keywords(kwargs)
        cu_seqlens = _packing_keyword(cu_seqlens, kwargs)
        use_cache = self.config.use_cache and not self.training if use_cache is None else use_cache
        if use_cache and self.training and self.is_gradient_checkpointing:
            logger.warning_once("a cache cannot be kept under gradient checkpointing; continuing with use_cache=False")
            use_cache, past_key_values = False, None
        output_attentions = self.config.output_attentions if output_attentions is None else output_attentions
        if output_attentions:
            output_attentions = self._can_show_attentions()
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states

        if input_ids is not None and input_ids.device.type == "cpu" and not torch.compiler.is_compiling():
            check_ids(input_ids, self.config.vocab_size)
        x = self.get_input_embeddings()(input_ids) if inputs_embeds is None else inputs_embeds
        new_cache = self.new_cache if use_cache else None
        context, real = make_context(
            x, attention_mask, position_ids, cu_seqlens, past_key_values, new_cache, bool(output_attentions)
        )
        x = self.embed(x, context)
        if real is not None:  # what is at padded places, NaN included, changes nothing
            x = x.masked_fill(~real[..., None], 0.0)
        x = self.drop_embeddings(x)
        for leader in self.leaders:
            context.shared[leader] = self.attention_of(self.blocks[leader]).prepare(context, x)
        hidden_states, attentions = [], []
        for block in self.blocks:
            if output_hidden_states:
                hidden_states.append(x)
            x, weights = self.run_block(block, x, context)
            attentions.append(weights)
        x = self.final_norm(x)
        if output_hidden_states:
            hidden_states.append(x)
        output = self.output_class(
            last_hidden_state=x,
            past_key_values=context.past_key_values,
            hidden_states=tuple(hidden_states) if output_hidden_states else None,
            attentions=tuple(attentions) if output_attentions else None,
        )
        return output if return_dict or return_dict is None else output.to_tuple()

    def _can_show_attentions(self) -> bool:
        """Whether some layer weighs keys; and a warning, once, of what its weights are not."""
        if not any(layer.method.has_weights for layer in self.attention_layers):
            logger.warning_once("no layer of this model weighs keys, so output_attentions gives None")
            return False
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            logger.warning_once(
                "attentions are computed beside the output, not on the way to it: a loss on them has a gradient, but "
                "the loss of the output has none with respect to them"
            )
        return True


def _packing_keyword(cu_seqlens: Tensor | None, kwargs: Options) -> Tensor | None:
    """transformers' data collators name the packing as FlashAttention does: cu_seq_lens_q and its companions."""
    queries, keys = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    if queries is None:
        return cu_seqlens
    if keys is not None and keys is not queries and (keys.shape != queries.shape or not bool((keys == queries).all())):
        raise InputError("cu_seq_lens_k differs from cu_seq_lens_q; packed self-attention needs the same for both")
    return queries
