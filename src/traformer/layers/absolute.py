"""Absolute positions, added to the token embeddings: sinusoidal and learned, both with random offsets on demand."""

from __future__ import annotations

import math
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from traformer.errors import InputError
from traformer.layers.context import AttentionContext
from traformer.layers.options import LayerConfig, SoftmaxArguments
from traformer.layers.softmax import SoftmaxAttentionLayer
from traformer.ops.eager import widest
from traformer.types import Options


def sinusoids(position_ids: Tensor, width: int, dtype: torch.dtype, base: float = 10_000.0) -> Tensor:
    """[B, T] -> [B, T, width]: channel 2e is sin(p / base^(2e / width)), channel 2e + 1 the cosine of that angle."""
    device = position_ids.device
    wide = widest(device)
    exponents = torch.arange(0, width, 2, dtype=wide, device=device) / width
    angles = position_ids.to(wide)[..., None] * base**-exponents  # [B, T, ceil(width / 2)]
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)[..., :width].to(dtype)


class AbsoluteArguments(SoftmaxArguments, total=False):
    """Keyword arguments that both layers here take."""

    embedding_range: float
    random_offset: int


class _AbsoluteAttention(SoftmaxAttentionLayer):
    """Softmax attention on embeddings that carry their position; the layers themselves know of none.

    embedding_range is the size of the embeddings that positions are added to, which start uniform in +-embedding_range.
    A layer on its own adds them to its input.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        embedding_range: float = 0.01,
        random_offset: int = 0,
        **more: Any,  # SoftmaxArguments, and the options of the method
    ) -> None:
        self.embedding_range = embedding_range  # before the parameters are initialised, which need it
        super().__init__(embed_dim, num_heads, num_kv_heads, random_offset=random_offset, **more)

    @classmethod
    def arguments_of(cls, config: LayerConfig) -> Options:
        return {"embedding_range": config.embedding_range}

    @classmethod
    def check_options(cls, options: Options, num_heads: int, head_dim: int) -> None:
        super().check_options(options, num_heads, head_dim)
        for name in set(options) & {"random_offset", "max_positions"}:
            if not isinstance(options[name], int) or options[name] < (1 if name == "max_positions" else 0):
                raise InputError(f"attention option {name} must be a whole number, got {options[name]!r}")

    def embed(self, x: Tensor, context: AttentionContext) -> Tensor:
        positions = context.positions(x.shape[1], x.device)
        if self.training and self.option["random_offset"]:
            shape = (x.shape[0], 1)
            if context.cu_seqlens is not None:  # one offset for each packed sequence
                shape = (1, x.shape[1])
            offsets = torch.randint(0, self.option["random_offset"] + 1, shape, device=x.device)
            if context.cu_seqlens is not None:
                places = torch.arange(x.shape[1], device=x.device)
                first = torch.searchsorted(context.cu_seqlens, places, right=True) - 1
                offsets = offsets[:, context.cu_seqlens[first].long()]
            positions = positions + offsets
        return x + self.position_embedding(positions, x)

    def position_embedding(self, positions: Tensor, x: Tensor) -> Tensor:
        """[B or 1, T] -> [B or 1, T, E]."""
        raise NotImplementedError


class SinusoidalAttention(_AbsoluteAttention):
    """Softmax attention with sinusoidal absolute positions added to the token embeddings.

    Source: Vaswani et al. 2017, base 10,000, no parameters. Choice: there the token embeddings are multiplied by
    sqrt(width) so that positions do not drown them; here embeddings start uniform in +-embedding_range, so instead
    the sinusoids are multiplied by a constant that gives them the embeddings' root mean square at the start
    (sinusoids have 1/sqrt(2)).

    Option random_offset: in training a sequence starts at a position drawn from 0 .. random_offset, so that a model
    sees positions beyond its training length (as in Kiyono et al. 2021, SHAPE, and later work on length
    generalisation); in evaluation it starts at 0. 0 switches it off.
    """

    name = "sinusoidal"

    def position_embedding(self, positions: Tensor, x: Tensor) -> Tensor:
        return sinusoids(positions, x.shape[-1], x.dtype) * (math.sqrt(2.0 / 3.0) * self.embedding_range)


class LearnedPositionAttention(_AbsoluteAttention):
    """Softmax attention with a learned vector for each absolute position added to the token embeddings.

    Source: Gehring et al. 2017 and GPT. The table (max_positions x width, in the first such layer) starts like the
    token embeddings, uniform in +-embedding_range; rows that training never reached stay as they started, which is why
    it fails beyond the training length. A longer input than the table is an error.

    Options: max_positions, rows of the table; random_offset, as in SinusoidalAttention.
    """

    name = "learned"

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        max_positions: int = 4096,
        **more: Unpack[AbsoluteArguments],
    ) -> None:
        super().__init__(embed_dim, num_heads, num_kv_heads, max_positions=max_positions, **more)

    def add_parameters(self) -> None:
        super().add_parameters()
        if self.layer_idx == self.leader:
            self.position_table = nn.Embedding(self.option["max_positions"], self.embed_dim)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.layer_idx == self.leader:
            nn.init.uniform_(self.position_table.weight, -self.embedding_range, self.embedding_range)

    def position_embedding(self, positions: Tensor, x: Tensor) -> Tensor:
        rows = self.option["max_positions"]
        if not torch.compiler.is_compiling() and positions.numel() and int(positions.max()) >= rows:
            raise InputError(
                f"position {int(positions.max())} is beyond the {rows} learned positions; "
                "train with a larger attention option max_positions"
            )
        vectors: Tensor = self.position_table(positions)
        return vectors
