"""How many sequences of each split go through the model at once: as many as memory and a sensible size allow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from traformer.models import memory
from traformer.tasks.base import Split

# Enough for every core to be busy; larger batches only leave the caches.
CPU_BATCH_TOKENS = 16_384
GPU_BATCH_TOKENS = 262_144
SHARE_OF_MEMORY = 0.5


def batch_sizes(
    model_config: Any, splits: Sequence[Split], examples: int, batch_tokens: int | None, device: Any
) -> dict[Split, int]:
    """For every split; a length of which not even one sequence fits is an error before anything is run."""
    available = memory.available_memory(device)
    tokens = batch_tokens or (GPU_BATCH_TOKENS if device.type == "cuda" else CPU_BATCH_TOKENS)
    sizes = {}
    for split in splits:
        length = split.task.sequence_length
        need = memory.memory_need(model_config, length, training=False, on_cpu=device.type == "cpu")
        memory.check_fits(
            need.total(1), available, f"one sequence of {length} tokens ({split.name} {split.length})",
            "leave that length out of --lengths",
        )  # fmt: skip
        fitting = int((available * SHARE_OF_MEMORY - need.fixed) // need.per_sequence)
        sizes[split] = max(1, min(examples, tokens // length, fitting))
    return sizes
