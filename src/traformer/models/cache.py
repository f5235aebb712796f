"""A model's key/value cache, which grows by doubling and, where keys carry no position, can be cut and joined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer

from traformer.errors import InputError
from traformer.layers.cache import KeyValueCache
from traformer.methods import stack_of
from traformer.models.config import TraformerConfig


class GrowingLayer(KeyValueCache, DynamicLayer):
    """One layer of a model's cache: transformers' stock layer copies everything at every token, this one does not."""


class TraformerCache(DynamicCache):
    """What a Traformer model remembers of the tokens it has read: one GrowingLayer per block.

    Besides transformers' own methods: `cut` and `join`. In TRA (and any method that writes no position into its keys) a
    piece of a cache means the same at any position, so caches of separate texts can be joined and read together.
    """

    layers: list[Any]  # of GrowingLayer

    def __init__(self, config: TraformerConfig) -> None:
        self.config = config
        Cache.__init__(self, layers=[GrowingLayer() for _ in range(config.num_hidden_layers)])

    @property
    def keys_carry_position(self) -> bool:
        """Whether a key depends on the position of its token."""
        return any(method.keys_carry_position for method in stack_of(self.config))

    def reserve(self, length: int) -> None:
        """Make room for so many tokens at once: no copies on the way there. Call it after the first tokens."""
        for layer in self.layers:
            layer.reserve(length)

    def cut(self, start: int, end: int | None = None) -> TraformerCache:
        """A new cache with a copy of the tokens start .. end - 1 of this one."""
        length = self.get_seq_length()
        end = length if end is None else end
        if not 0 <= start <= end <= length:
            raise InputError(f"cut({start}, {end}) is not within the {length} tokens of the cache")
        if start > 0 and self.keys_carry_position:
            raise InputError(
                f"keys of attention {self.config.attention!r} carry their position: its cache can only be cut from 0"
            )
        piece = TraformerCache(self.config)
        for mine, theirs in zip(piece.layers, self.layers, strict=True):
            if theirs.keys is not None:
                mine.store(theirs.keys[:, :, start:end].clone(), theirs.values[:, :, start:end].clone())
        return piece

    @classmethod
    def join(cls, caches: Sequence[TraformerCache]) -> TraformerCache:
        """A new cache with the tokens of all, in this order: each text was read for itself, new tokens see them all."""
        if not caches:
            raise InputError("join needs at least one cache")
        first = caches[0]
        if len(caches) > 1 and first.keys_carry_position:
            raise InputError(
                f"keys of attention {first.config.attention!r} carry their position: its caches cannot be joined"
            )
        joined = cls(first.config)
        for index, layer in enumerate(joined.layers):
            pieces = [cache.layers[index] for cache in caches if cache.get_seq_length()]
            if len({piece.keys.shape[:2] + piece.keys.shape[3:] for piece in pieces}) > 1:
                raise InputError("join needs caches of one model and one batch size")
            if pieces:
                layer.store(torch.cat([x.keys for x in pieces], dim=2), torch.cat([x.values for x in pieces], dim=2))
        return joined

    def repeat(self, count: int) -> TraformerCache:
        """A new cache for a batch that has each row of this one `count` times."""
        copy = self.cut(0)
        copy.batch_repeat_interleave(count)
        return copy
