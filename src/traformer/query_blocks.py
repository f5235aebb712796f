"""How many queries eager attention works off at once; free of torch, for the estimate of memory reads it too."""

from __future__ import annotations

# At most so many, each block against the keys up to its end. With gradients longer inputs are computed again in the
# backward, block by block; shorter ones are kept.
QUERY_BLOCK = 512
# On a CPU blocks shrink until their scores are so many, or SHORTEST_BLOCK queries are left: each result of a larger one
# is fresh pages of memory, which took two thirds of a training step at 512 keys and four fifths of a read of 8,192.
CPU_BLOCK_ENTRIES = 1 << 20
SHORTEST_BLOCK = 16


def queries_at_once(batch: int, heads: int, keys: int, on_cpu: bool) -> int:
    """The length of a block of queries of `batch` sequences."""
    if not on_cpu:
        return QUERY_BLOCK
    return min(QUERY_BLOCK, max(SHORTEST_BLOCK, CPU_BLOCK_ENTRIES // max(1, batch * heads * keys)))
