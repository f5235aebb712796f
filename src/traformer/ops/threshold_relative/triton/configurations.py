"""The tile shapes: one small fixed table by kernel, element size and head size. Nothing here depends on a length."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

STRIPS = 32  # column strips, and so counts per row that the backward stores: a fixed number keeps memory at O(T)
LARGEST_HEAD = 256
MOST_KEYS = 2**24  # counts are exact in fp32 below this
COUNT_BY_TRIANGLE = (
    True  # kept keys of a tile by a matrix product instead of a scan: fewer instructions, see docs/gpu.md
)

# Integer arguments that change with the batch or the length: a kernel must not be compiled again for their values.
UNSPECIALISED = [
    *(f"stride_{tensor}{axis}" for tensor in ("q", "k", "v", "o", "g", "dq", "dk", "dv") for axis in "bht"),
    "batch", "queries", "keys", "query_start", "padding_stride", "query_heads", "key_heads", "blocks", "row_blocks",
    "drop_limit", "strips", "strip_blocks", "splits", "near_keys", "index_blocks", "group", "split_blocks",
    "all_keys", "all_parts",
]  # fmt: skip


@dataclass(frozen=True)
class Configuration:
    rows: int  # queries of a tile
    keys: int  # keys of a tile
    warps: int


# (kernel, bytes per element): tile shapes by head size, up to and including it; results/gpu/compiled.md has
# their registers.
_TABLE: dict[tuple[str, int], dict[int, Configuration]] = {
    ("forward", 2): {64: Configuration(64, 32, 4), 128: Configuration(128, 16, 8), 256: Configuration(64, 16, 8)},
    ("forward", 4): {64: Configuration(32, 16, 4), 128: Configuration(32, 16, 8), 256: Configuration(16, 16, 8)},
    # Decode has as many rows as a key head has queries. Its key blocks divide those of a key index, 64.
    ("decode", 2): {64: Configuration(16, 64, 4), 256: Configuration(16, 64, 8)},
    ("decode", 4): {256: Configuration(16, 16, 8)},
    # Both kernels of the backward must cut the keys alike. Of the shapes that no architecture spills at, these have the
    # fewest instructions per score (docs/gpu.md).
    ("query_gradient", 2): {
        64: Configuration(128, 32, 8),
        128: Configuration(128, 16, 8),
        256: Configuration(64, 16, 8),
    },
    ("query_gradient", 4): {64: Configuration(32, 16, 4), 128: Configuration(16, 16, 4), 256: Configuration(16, 16, 8)},
    ("key_gradient", 2): {64: Configuration(16, 32, 4), 128: Configuration(32, 16, 4), 256: Configuration(16, 16, 8)},
    ("key_gradient", 4): {256: Configuration(16, 16, 8)},
}


def configuration(kernel: str, dtype: torch.dtype, head_size: int) -> Configuration:
    """The same for every architecture: what fits sm_80's registers without spilling fits the others'."""
    table = _TABLE[kernel, dtype.itemsize]
    return table[min(size for size in table if size >= head_size)]


def block_d(head_size: int) -> int:
    """Channels of a tile: a power of two, at least what a matrix instruction takes."""
    return max(16, 1 << (head_size - 1).bit_length())


def alignment(*tensors: Tensor) -> int:
    """A power of two that divides every stride, by the head size alone wherever the layout is an ordinary one."""
    align = math.gcd(tensors[0].shape[3], 16)
    if all(x.stride(axis) % align == 0 for x in tensors for axis in range(3)):
        return align
    return 1
