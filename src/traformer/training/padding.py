"""Less padding: examples of similar length go through the model together."""

from __future__ import annotations

import torch

from traformer.tasks import Task
from traformer.tasks.base import Batch

# A part has at least so many tokens when padded: smaller ones would cost more in calls than they save in padding.
PART_TOKENS = {"cpu": 1024}
OTHER_PART_TOKENS = 65_536  # of a GPU
MOST_PARTS = 4


def similar_lengths(task: Task, batch: Batch, device: torch.device) -> list[Batch]:
    """The batch in parts of similar length, each padded to its own longest example.

    Their number follows from the task and the batch's size, not from the examples drawn, so that every process of a
    group takes as many turns.
    """
    shortest, longest = task.length_range
    if shortest == longest:
        return [batch]
    tokens = len(batch) * task.sequence_length
    parts = min(MOST_PARTS, len(batch), tokens // PART_TOKENS.get(device.type, OTHER_PART_TOKENS))
    return batch.by_length(parts) if parts > 1 else [batch]
