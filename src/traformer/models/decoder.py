"""The decoder trunk: embedding, blocks of attention and gated MLP, final norm."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import logging

from traformer.errors import InputError
from traformer.layers import ATTENTIONS, AttentionContext, AttentionLayer, RMSNorm
from traformer.models.cache import TraformerCache
from traformer.models.card import write_model_card
from traformer.models.checks import check_ids, check_loaded
from traformer.models.config import TraformerConfig
from traformer.models.context import make_context
from traformer.ops.elementwise import dropout, gated_silu

logger = logging.get_logger(__name__)


class GatedMLP(nn.Module):
    """Linear(e, 2m) split in two halves; Linear(m, e) of the first times silu of the second."""

    def __init__(self, config: TraformerConfig) -> None:
        super().__init__()
        assert config.intermediate_size is not None
        self.in_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size)
        self.out_proj = nn.Linear(config.intermediate_size, config.hidden_size)
        self.dropout_p = config.hidden_dropout

    def forward(self, x: Tensor) -> Tensor:
        return self.out_proj(gated_silu(self.in_proj(x), self.dropout_p, self.training))


class DecoderBlock(GradientCheckpointingLayer):
    """Norm, attention, norm, MLP. With residual "normed" the stream that is added to is the normed one."""

    def __init__(self, config: TraformerConfig, layer_idx: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = ATTENTIONS[config.attention](config, layer_idx)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config)
        self.carries_normed = config.residual == "normed"

    def forward(self, x: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor | None]:
        """x [B, T, E] -> x [B, T, E], attention weights [B, H, T, Tk] or None."""
        normed = self.attention_norm(x)
        attended, weights = self.self_attn(normed, context)
        x = (normed if self.carries_normed else x) + attended
        normed = self.mlp_norm(x)
        x = (normed if self.carries_normed else x) + self.mlp(normed)
        return x, weights


class TraformerPreTrainedModel(PreTrainedModel):
    """Initialisation and what transformers needs to know about our models."""

    config: TraformerConfig
    config_class = TraformerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DecoderBlock"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _can_compile_fullgraph = True

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, pretrained_model_name_or_path: Any, *args: Any, strict: bool = True, **kwargs: Any
    ) -> Any:
        """transformers' from_pretrained; with strict, weights that do not fit the configuration are an error.

        strict=False starts what the checkpoint lacks afresh and leaves out what the model lacks.
        """
        wants_info = kwargs.pop("output_loading_info", False)
        path = pretrained_model_name_or_path
        loaded: Any = super().from_pretrained(path, *args, output_loading_info=True, **kwargs)
        model, info = loaded
        if strict:
            check_loaded(info, path, model.config.attention)
        return (model, info) if wants_info else model

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """transformers' save_pretrained, and a model card where the folder has none."""
        super().save_pretrained(save_directory, *args, **kwargs)
        if kwargs.get("is_main_process", True):
            write_model_card(self, save_directory)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """As the authors' module starts: see the decoder in docs/architecture.md.

        transformers calls this on every module, on loading too; its init functions leave alone what was loaded.
        """
        if isinstance(module, nn.Embedding):
            fresh = not getattr(module.weight, "_is_hf_initialized", False)
            init.uniform_(module.weight, -self.config.embedding_range, self.config.embedding_range)
            if fresh and module.padding_idx is not None:
                module.weight[module.padding_idx].zero_()
        elif isinstance(module, nn.Linear):
            if module is self.get_output_embeddings():
                init.normal_(module.weight, std=self.config.initializer_range)
            else:  # torch's own default, bias included
                init.kaiming_uniform_(module.weight, a=math.sqrt(5))
                if hasattr(module, "bias_start"):  # its layer wants it so
                    init.copy_(module.bias, torch.as_tensor(module.bias_start).expand_as(module.bias))  # type: ignore[arg-type]
                elif module.bias is not None:
                    bound = 1.0 / math.sqrt(module.in_features)
                    init.uniform_(module.bias, -bound, bound)
        elif isinstance(module, RMSNorm):
            init.ones_(module.weight)
        elif isinstance(module, AttentionLayer):
            module.reset_own_parameters()


class TraformerModel(TraformerPreTrainedModel):
    """Tokens to hidden states."""

    def __init__(self, config: TraformerConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.layers: Any = nn.ModuleList(DecoderBlock(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()

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
    ) -> BaseModelOutputWithPast | tuple:
        """See TraformerForCausalLM.forward."""
        if (input_ids is None) == (inputs_embeds is None):
            raise InputError("give exactly one of input_ids and inputs_embeds")
        cu_seqlens = _packing_keyword(cu_seqlens, kwargs)
        use_cache = self.config.use_cache and not self.training if use_cache is None else use_cache
        if use_cache and self.training and self.is_gradient_checkpointing:
            logger.warning_once("a cache cannot be kept under gradient checkpointing; going on with use_cache=False")
            use_cache, past_key_values = False, None
        output_attentions = self.config.output_attentions if output_attentions is None else output_attentions
        output_hidden_states = (
            self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        )

        if input_ids is not None and input_ids.device.type == "cpu" and not torch.compiler.is_compiling():
            check_ids(input_ids, self.config.vocab_size)
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        new_cache = self.new_cache if use_cache else None
        context, real = make_context(
            x, attention_mask, position_ids, cu_seqlens, past_key_values, new_cache, bool(output_attentions)
        )
        x = self.layers[0].self_attn.embed(x, context)
        if real is not None:  # what stands at padded places, NaN included, can change nothing
            x = x.masked_fill(~real[..., None], 0.0)
        x = dropout(x, self.config.hidden_dropout, self.training)
        context.shared = self.layers[0].self_attn.prepare(context, x)
        hidden_states, attentions = [], []
        for block in self.layers:
            if output_hidden_states:
                hidden_states.append(x)
            x, weights = block(x, context)
            attentions.append(weights)
        x = self.norm(x)
        if output_hidden_states:
            hidden_states.append(x)
        output = BaseModelOutputWithPast(
            last_hidden_state=x,
            past_key_values=context.past_key_values,
            hidden_states=tuple(hidden_states) if output_hidden_states else None,  # type: ignore[arg-type]
            attentions=tuple(attentions) if output_attentions else None,
        )
        return output if return_dict or return_dict is None else output.to_tuple()

    def new_cache(self) -> TraformerCache:
        """An empty cache that grows with what it is given."""
        return TraformerCache(self.config)


def _packing_keyword(cu_seqlens: Tensor | None, kwargs: dict[str, Any]) -> Tensor | None:
    """transformers' data collators name the packing as FlashAttention does: cu_seq_lens_q and its companions."""
    queries, keys = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    if queries is None:
        return cu_seqlens
    if keys is not None and keys is not queries and (keys.shape != queries.shape or not bool((keys == queries).all())):
        raise InputError("cu_seq_lens_k differs from cu_seq_lens_q; packed self-attention needs the same for both")
    return queries
