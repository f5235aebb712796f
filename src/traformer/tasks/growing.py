"""The same example with more tokens that bear on none of its answers: what attention must not be distracted by."""

from __future__ import annotations

import numpy as np

from traformer.tasks.base import Arrays, Task
from traformer.tasks.tokens import NO_SOURCE


def grow(task: Task, example: Arrays, count: int) -> tuple[Arrays, int] | None:
    """One example [1, T] with `count` irrelevant tokens more, and where they begin; None: the task has no place."""
    found = task.irrelevant(example, count)
    if found is None:
        return None
    place, tokens = found
    ids, answers, sources = (array[:, : int(example.lengths[0])] for array in example[:3])
    moved = np.where(sources >= place, sources + count, sources)
    at = np.full(count, place)
    grown = Arrays(
        np.insert(ids, at, tokens, axis=1),
        np.insert(answers, at, False, axis=1),
        np.insert(moved, at, NO_SOURCE, axis=1),
        example.lengths + count,
    )
    return grown, place
