"""A converted decoder without its head: the source's embedding, blocks and norms around attention layers of ours."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from traformer.errors import InputError
from traformer.layers import AttentionContext, AttentionLayer
from traformer.methods import stack_of
from traformer.models.conversion.attention import ConvertedAttention, converted_layer
from traformer.models.trunk import Trunk
from traformer.types import Options


class ConvertedTrunk(Trunk):
    """Mixed in before the trunk class of a family."""

    output_class = BaseModelOutputWithPastAndCrossAttentions  # GPT-2's head looks for cross_attentions
    wpe: nn.Embedding  # in GPT-2, where its positions are kept
    drop: nn.Module  # in GPT-2
    blocks_name: ClassVar[str]
    attention_name: ClassVar[str]
    norm_name: ClassVar[str]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for index, (block, method) in enumerate(zip(self.blocks, stack_of(config), strict=True)):
            layer = converted_layer(method.attention).from_config(config, index)
            layer.take_over(getattr(block, self.attention_name), config)
            setattr(block, self.attention_name, layer)
        self.leaders = self.find_leaders()
        self.drop_positions()
        self.post_init()

    @property
    def blocks(self) -> nn.ModuleList:
        return getattr(self, self.blocks_name)

    @property
    def final_norm(self) -> nn.Module:
        return getattr(self, self.norm_name)

    def attention_of(self, block: nn.Module) -> AttentionLayer:
        return getattr(block, self.attention_name)

    def drop_positions(self) -> None:
        """Remove the source's position embeddings."""
        if hasattr(self, "rotary_emb"):
            del self.rotary_emb
        if hasattr(self, "wpe") and not self.config.keep_positions:
            del self.wpe

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, ConvertedAttention):  # after its children
            module.start_added()

    def check_keywords(self, keywords: Options) -> None:
        for name in ("token_type_ids", "encoder_hidden_states"):
            if keywords.get(name) is not None:
                raise InputError(f"a converted model takes no {name}")

    def embed(self, x: Tensor, context: AttentionContext) -> Tensor:
        return self.embed_positions(super().embed(x, context), context)

    def drop_embeddings(self, x: Tensor) -> Tensor:
        return self.drop(x) if hasattr(self, "drop") else x

    def run_block(self, block: nn.Module, x: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor | None]:
        # The source's block passes on what its attention returns except the weights: these come back in `collected`.
        collected: dict[int, Tensor | None] = {}
        x = block(x, context=context, collected=collected)
        return x, next(iter(collected.values()), None)

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
