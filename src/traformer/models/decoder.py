"""The decoder trunk: embedding, blocks of attention and gated MLP, final norm."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer

from traformer.layers import AttentionContext, AttentionLayer, RMSNorm, layer_class
from traformer.layers.initialization import reset_module
from traformer.methods import stack_of
from traformer.models.card import model_card
from traformer.models.config import TraformerConfig
from traformer.models.saving import SavedModel
from traformer.models.trunk import Trunk
from traformer.ops.elementwise import dropout, gated_silu


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
        self.self_attn = layer_class(stack_of(config)[layer_idx].attention).from_config(config, layer_idx)
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


class TraformerPreTrainedModel(SavedModel):
    """Initialisation and what transformers needs to know about our models."""

    config: TraformerConfig
    config_class = TraformerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DecoderBlock"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _can_compile_fullgraph = True

    def model_card(self, folder: str) -> str:
        return model_card(self, folder)

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
            else:
                reset_module(module)
        elif isinstance(module, RMSNorm):
            reset_module(module)
        elif isinstance(module, AttentionLayer):
            module.reset_own_parameters()


class TraformerModel(TraformerPreTrainedModel, Trunk):
    """The authors' decoder without its head."""

    def __init__(self, config: TraformerConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.layers = nn.ModuleList(DecoderBlock(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.leaders = self.find_leaders()
        self.post_init()

    @property
    def blocks(self) -> nn.ModuleList:
        return self.layers

    @property
    def final_norm(self) -> nn.Module:
        return self.norm

    def attention_of(self, block: nn.Module) -> AttentionLayer:
        return cast(DecoderBlock, block).self_attn

    def drop_embeddings(self, x: Tensor) -> Tensor:
        return dropout(x, self.config.hidden_dropout, self.training)

    def run_block(self, block: nn.Module, x: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor | None]:
        return block(x, context)
