"""Counter-based random numbers: a draw is a function of (seed, stream, example index, purpose, position) and of nothing
else, so an example is the same whichever batch, worker or resumed run asks for it.

Each number is the splitmix64 finaliser of its counter. All arithmetic is modulo 2**64.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

_MASK = (1 << 64) - 1
_WEYL = 0x9E3779B97F4A7C15  # odd, so index -> index * _WEYL never repeats
_PURPOSE = 0xD1342543DE82EF95  # a second odd step, so that purposes do not fall on neighbouring positions
_MULTIPLY_1 = 0xBF58476D1CE4E5B9
_MULTIPLY_2 = 0x94D049BB133111EB


def mix_int(value: int) -> int:
    """The finaliser on one Python integer."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * _MULTIPLY_1) & _MASK
    value = ((value ^ (value >> 27)) * _MULTIPLY_2) & _MASK
    return value ^ (value >> 31)


def mix(words: Words) -> Words:
    """The finaliser on an array, in place; returns the same array."""
    words ^= words >> np.uint64(30)
    words *= np.uint64(_MULTIPLY_1)
    words ^= words >> np.uint64(27)
    words *= np.uint64(_MULTIPLY_2)
    words ^= words >> np.uint64(31)
    return words


def name_key(name: str) -> int:
    """A number for a name, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def stream_key(seed: int, *stream: int) -> int:
    """One key for a seed and a stream (a few integers that distinguish one task setting from another)."""
    key = mix_int(seed + _WEYL)
    for part in stream:
        key = mix_int(key ^ mix_int(part + _PURPOSE))
    return key


def example_keys(key: int, start: int, count: int) -> Words:
    """One key per example index start .. start + count - 1; [count]."""
    first = (key + (start + 1) * _WEYL) & _MASK
    return mix(np.arange(count, dtype=np.uint64) * np.uint64(_WEYL) + np.uint64(first))


def draw(keys: Words, purpose: int) -> Words:
    """One 64-bit number per example; [count]."""
    return mix(keys + np.uint64((purpose * _PURPOSE) & _MASK))


def draw_row(keys: Words, purpose: int, width: int) -> Words:
    """`width` 64-bit numbers per example; [count, width]. Number j does not depend on the width."""
    steps = np.arange(1, width + 1, dtype=np.uint64) * np.uint64(_WEYL)
    return mix(draw(keys, purpose)[:, None] + steps)


def below(words: Words, bound: int | NDArray[np.int64]) -> NDArray[np.int64]:
    """Integers in 0 .. bound - 1, off uniform by less than bound / 2**32; bound < 2**31, a number or an array."""
    high = words >> np.uint64(32)
    high *= np.asarray(bound, dtype=np.uint64)
    high >>= np.uint64(32)
    return high.view(np.int64)
