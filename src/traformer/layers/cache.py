"""A layer's keys and values, in buffers that grow by doubling."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from traformer.errors import InputError
from traformer.ops.threshold_relative.key_balls import KeyBalls
from traformer.ops.threshold_relative.key_index import KeyIndex


class KeyValueCache:
    """What one layer remembers: keys and values [B, H, length, D] in buffers with room to spare.

    For a layer on its own: `cache = KeyValueCache()`, then `y = attn(x, cache=cache)` for one token or many at a time.
    New tokens are written into the buffers, which grow by doubling, so that a token costs O(1) on average.
    """

    is_initialized = False

    def __init__(self) -> None:
        self._buffers: tuple[Tensor, Tensor] | None = None  # each [B, H, capacity, D]
        self._length = 0
        self.key_index: KeyIndex | None = None
        self._index_is_inference = False
        self.key_balls: KeyBalls | None = None
        super().__init__()

    # transformers' own methods read and assign `keys` and `values`; both are views of the buffers.
    @property
    def keys(self) -> Tensor | None:
        return None if self._buffers is None else self._buffers[0][:, :, : self._length]

    @keys.setter
    def keys(self, keys: Tensor | None) -> None:
        if keys is not None:
            raise AttributeError("the cache's keys and values change together; use `store`")

    @property
    def values(self) -> Tensor | None:
        return None if self._buffers is None else self._buffers[1][:, :, : self._length]

    @values.setter
    def values(self, values: Tensor | None) -> None:
        if values is not None:
            raise AttributeError("the cache's keys and values change together; use `store`")

    @property
    def capacity(self) -> int:
        """Tokens the buffers have room for."""
        return 0 if self._buffers is None else self._buffers[0].shape[2]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self._buffers = (_empty_like(key_states), _empty_like(value_states))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **ignored: object) -> tuple[Tensor, Tensor]:
        """Add the new tokens' keys and values [B, H, T, D]; returns all of them."""
        if self._buffers is None:
            self.lazy_initialization(key_states, value_states)
        keys, values = self.keys, self.values
        assert keys is not None and values is not None and self._buffers is not None
        if key_states.shape[0] != keys.shape[0]:
            raise InputError(
                f"the cache holds a batch of {keys.shape[0]}, but the new tokens are a batch of {key_states.shape[0]}; "
                "use a cache of its own for each batch"
            )
        if key_states.shape[3] != keys.shape[3]:
            raise InputError(
                f"the cache holds keys of {keys.shape[3]} channels, but the new ones have {key_states.shape[3]}: it is "
                "another layer's cache"
            )
        end = self._length + key_states.shape[2]
        if torch.is_grad_enabled() and (key_states.requires_grad or keys.requires_grad):
            # Autograd must see every step: nothing is written over.
            self.store(torch.cat((keys, key_states), dim=2), torch.cat((values, value_states), dim=2))
        else:
            if end > self.capacity or (self._buffers[0].is_inference() and not torch.is_inference_mode_enabled()):
                self._reserve(max(end, 2 * self._length))
            for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
                buffer[:, :, self._length : end] = new
            self._length = end
        return self.keys, self.values  # type: ignore[return-value]

    def reserve(self, capacity: int) -> None:
        """Make room for so many tokens at once, where that many are known to come; there must be one already."""
        if self._buffers is not None and capacity > self.capacity:
            self._reserve(capacity)

    def _reserve(self, capacity: int) -> None:
        assert self._buffers is not None
        grown = []
        for buffer in self._buffers:
            batch, heads, _, width = buffer.shape
            new = buffer.new_empty(batch, heads, capacity, width)
            new[:, :, : self._length] = buffer[:, :, : self._length]
            grown.append(new)
        self._buffers = (grown[0], grown[1])

    def store(self, keys: Tensor, values: Tensor) -> None:
        """Hold exactly these keys and values [B, H, length, D] from now on."""
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self._buffers, self._length, self.key_index = (keys, values), keys.shape[2], None
        self.key_balls = None

    def indexed(self, keys: Tensor) -> KeyIndex:
        """The index of these keys [B, H, length, D], brought up to date with those added since the last call."""
        leaves_inference = self._index_is_inference and not torch.is_inference_mode_enabled()
        if self.key_index is None or leaves_inference:  # what inference mode made cannot be written to outside it
            self.key_index, self._index_is_inference = KeyIndex(), torch.is_inference_mode_enabled()
        self.key_index.append(keys[:, :, self.key_index.length :])
        return self.key_index

    def covered(self, keys: Tensor) -> KeyBalls | None:
        """Balls that hold these keys [B, H, length, D], brought up to date; None once they have proven useless."""
        if self.key_balls is None:
            self.key_balls = KeyBalls()
        if self.key_balls.is_in_vain:
            return None
        self.key_balls.append(keys[:, :, self.key_balls.length :])
        return self.key_balls

    def get_seq_length(self) -> int:
        return self._length

    def reset(self) -> None:
        self._buffers, self._length, self.is_initialized, self.key_index = None, 0, False, None
        self.key_balls = None

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last -tokens_to_remove tokens (transformers counts them as a negative number)."""
        if tokens_to_remove > 0:
            raise InputError(f"crop takes minus the number of tokens to remove, not {tokens_to_remove}")
        self._length = max(self._length + tokens_to_remove, 0)
        if self.key_index is not None:
            self.key_index.truncate(min(self.key_index.length, self._length))
        if self.key_balls is not None:
            self.key_balls.length = min(self.key_balls.length, self._length)  # balls around more keys also hold these

    def offload(self) -> None:
        self._each(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        if self.is_initialized:
            self._each(lambda x: x.to(self.device, non_blocking=True))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._each(lambda x: x.index_select(0, beam_idx.to(x.device)))
        if self.key_index is not None:
            self.key_index.reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._each(lambda x: x.repeat_interleave(repeats, dim=0))
        if self.key_index is not None:
            self.key_index.repeat(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._each(lambda x: x[indices])
        self.key_index = None

    def _each(self, change: Callable[[Tensor], Tensor]) -> None:
        """Change the buffers with what room they have left, so that the next token needs no copy."""
        self.key_balls = None  # made again when it is asked for
        if self._buffers is not None:
            self._buffers = (change(self._buffers[0]), change(self._buffers[1]))


def _empty_like(x: Tensor) -> Tensor:
    """[B, H, 0, D], holding no memory of x."""
    return x.new_empty(x.shape[0], x.shape[1], 0, x.shape[3])
