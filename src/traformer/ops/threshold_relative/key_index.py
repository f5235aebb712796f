"""What a cache keeps beside its keys so that decoding need not read all of them.

Keys are summarised in blocks of 64: the least and the greatest value of every channel, and the largest norm. A query
that cannot score above its threshold anywhere within a block's bounds passes over the block unread, which is exact; and
the largest norm of all bounds every score, which is what the early exit needs. Appending touches only the new keys and
the block they fall into.
"""

from __future__ import annotations

import torch
from torch import Tensor

from traformer.errors import InputError

BLOCK = 64  # the compiled kernel's key block; see cpu.INDEX_BLOCK
_TINY = 1e-16  # squares of smaller keys may underflow; any upper bound of a norm will do


class KeyIndex:
    """Summaries of the keys of one cache layer, in step with them.

    A cache layer holds one and calls, after it has changed its keys k [B, Hkv, T, D]:

        append(k_new)            k_new [B, Hkv, n, D] now follow the keys described so far
        truncate(length)         keys from `length` on were dropped
        reorder(batch_index)     the batch was rearranged (beam search): row i is now what row batch_index[i] was
        select / repeat          the batch was cut down to some rows, or each row was repeated n times
        reset()                  the cache was emptied

    and passes it on as `threshold_relative_attention(..., key_index=index)`. It must describe at least the keys up to
    the last query; describing more is harmless, since bounds over more keys are only wider. After truncate the block
    that was cut keeps its old, wider bounds: still exact, merely skipped less often.
    """

    def __init__(self) -> None:
        self.length = 0
        self._low: Tensor | None = None  # [B, Hkv, blocks, D]
        self._high: Tensor | None = None
        self._norm: Tensor | None = None  # [B, Hkv, 1 + blocks]; entry 0: the largest of all

    def append(self, k_new: Tensor) -> None:
        if k_new.dim() != 4:
            raise InputError(f"k_new must be [batch, key heads, new keys, head size], not {list(k_new.shape)}")
        count = k_new.shape[2]
        if count == 0:
            return
        self._reserve(k_new, self.length + count)
        assert self._low is not None and self._high is not None and self._norm is not None
        keys = k_new.detach().float()
        norms = keys.norm(dim=-1).mul_(1.0001).clamp_(min=_TINY).nan_to_num_(nan=torch.inf)  # [B, Hkv, n]
        norms = torch.where(keys.isfinite().all(-1), norms, torch.inf)
        done = 0
        while done < count:
            block, filled = divmod(self.length, BLOCK)
            if filled == 0 and count - done >= BLOCK:  # whole blocks at once
                blocks = (count - done) // BLOCK
                taken = blocks * BLOCK
                part = keys[:, :, done : done + taken].unflatten(2, (blocks, BLOCK))
                self._low[:, :, block : block + blocks] = part.amin(3)
                self._high[:, :, block : block + blocks] = part.amax(3)
                self._norm[:, :, 1 + block : 1 + block + blocks] = (
                    norms[:, :, done : done + taken].unflatten(2, (blocks, BLOCK)).amax(3)
                )
            else:
                taken = min(BLOCK - filled, count - done)
                part = keys[:, :, done : done + taken]
                low, high, norm = part.amin(2), part.amax(2), norms[:, :, done : done + taken].amax(2)
                if filled:
                    low = torch.minimum(self._low[:, :, block], low)
                    high = torch.maximum(self._high[:, :, block], high)
                    norm = torch.maximum(self._norm[:, :, 1 + block], norm)
                self._low[:, :, block], self._high[:, :, block], self._norm[:, :, 1 + block] = low, high, norm
            done += taken
            self.length += taken
        self._norm[:, :, 0] = torch.maximum(self._norm[:, :, 0], norms.amax(2))

    def truncate(self, length: int) -> None:
        if not 0 <= length <= self.length:
            raise InputError(f"length must be between 0 and {self.length}, not {length}")
        self.length = length
        if length == 0 and self._norm is not None:
            self._norm.zero_()

    def reset(self) -> None:
        self.truncate(0)

    def select(self, batch_index: Tensor) -> None:
        """Row i becomes what row batch_index[i] was; the batch may change its size."""
        if self._low is not None and self._high is not None and self._norm is not None:
            index = batch_index.to(self._low.device)
            self._low, self._high, self._norm = (x.index_select(0, index) for x in (self._low, self._high, self._norm))

    reorder = select

    def repeat(self, repeats: int) -> None:
        """Every row is now there `repeats` times, one copy after the other."""
        if self._low is not None and self._high is not None and self._norm is not None:
            self._low, self._high, self._norm = (
                x.repeat_interleave(repeats, dim=0) for x in (self._low, self._high, self._norm)
            )

    def tensors(self, needed: int) -> tuple[Tensor, Tensor, Tensor]:
        """low and high [B, Hkv, blocks, D], norm [B, Hkv, 1 + blocks]: what the operator takes, for `needed` keys."""
        if self._low is None or self._high is None or self._norm is None or self.length < needed:
            raise InputError(
                f"key_index describes {self.length} keys, the queries see {needed}; append the missing ones"
            )
        return self._low, self._high, self._norm

    def _reserve(self, like: Tensor, length: int) -> None:
        """Room for `length` keys; grows by doubling, so that appending one key costs no copy of the rest on average."""
        batch, heads, _, width = like.shape
        needed = -(-length // BLOCK)
        if self._low is not None and self._low.shape[:2] + self._low.shape[3:] != (batch, heads, width):
            raise InputError(
                f"k_new {list(like.shape)} does not fit the keys described so far, "
                f"batch {self._low.shape[0]}, {self._low.shape[1]} heads of size {self._low.shape[3]}"
            )
        capacity = 0 if self._low is None else self._low.shape[2]
        if needed <= capacity:
            return
        room = max(needed, 2 * capacity, 16)
        low = torch.zeros(batch, heads, room, width, dtype=torch.float32, device=like.device)
        high = torch.zeros_like(low)
        norm = torch.zeros(batch, heads, 1 + room, dtype=torch.float32, device=like.device)
        if self._low is not None and self._high is not None and self._norm is not None:
            low[:, :, :capacity], high[:, :, :capacity], norm[:, :, : 1 + capacity] = self._low, self._high, self._norm
        self._low, self._high, self._norm = low, high, norm
