"""A counter-based dropout mask: a pure function of (seed, batch, head, query, key), so every backend draws the same."""

from __future__ import annotations

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF
KEY_STEP = 0x9E3779B9


def mix(x: Tensor) -> Tensor:
    """A 32-bit finaliser on int64 tensors of uint32 values (products wrap mod 2^64: the low half stays right)."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _LOW
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _LOW
    return x ^ (x >> 16)


def row_keys(seed: Tensor, head: Tensor, query: Tensor) -> Tensor:
    """One 32-bit key per row. head = batch * Hq + head index; query = absolute position (all broadcast)."""
    seed = seed.to(torch.int64)
    head_key = mix(mix(mix(seed & _LOW) ^ ((seed >> 32) & _LOW)) ^ head.to(torch.int64))
    return mix(head_key ^ query.to(torch.int64))


def drop_limit(p: float) -> int:
    """A key is dropped when its hash is below this."""
    return int(p * 2.0**32)


def survivors(keys: Tensor, key_position: Tensor, p: float) -> Tensor:
    """True where the weight survives. keys [..., R, 1], key_position [..., 1, C] -> bool [..., R, C]."""
    return mix((keys + key_position.to(torch.int64) * KEY_STEP) & _LOW) >= drop_limit(p)
