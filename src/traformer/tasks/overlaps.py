"""How many test examples also occur in training: streams never share a seed, but short strings recur by chance."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from traformer.errors import InputError
from traformer.tasks import rng
from traformer.tasks.base import Arrays, Task
from traformer.tasks.checks import check_count

_CHUNK_TOKENS = 1 << 20


class Shown(NamedTuple):
    """Examples of a task, by their indices, which training has shown."""

    task: Task
    indices: range


@dataclasses.dataclass(frozen=True)
class Overlap:
    """`shared` of `examples` test examples occur among the first `training_examples` of training."""

    shared: int
    examples: int
    training_examples: int

    @property
    def share(self) -> float:
        """The fraction of test examples that training has shown."""
        return self.shared / self.examples


def overlap(training: Iterable[Shown], test: Task, seed: int, examples: int) -> Overlap:
    """Count the first `examples` test examples (of `test_seed(seed)`) that occur among those of training.

    Exact: equal hashes only select the candidates, which are then compared token by token.
    """
    training = list(training)
    examples = check_count("examples", examples, 1, "a share is counted on examples")
    training_examples = sum(
        check_count("training_examples", len(shown.indices), 1, "a share is counted on examples") for shown in training
    )
    if any(task.name != test.name or task.token_names != test.token_names for task, _ in training):
        raise InputError("training and test do not share a vocabulary; take the test task from training.test_splits()")
    training = [shown for shown in training if _share_a_length(shown.task, test)]
    if not training:
        return Overlap(0, examples, training_examples)
    rows: dict[bytes, int] = {}  # distinct test examples and how often each is drawn
    test_hashes = []
    for arrays in _chunks(Shown(test, range(examples)), Task.test_seed(seed)):
        test_hashes.append(_hashes(arrays))
        for row in range(len(arrays.lengths)):
            key = _row_bytes(arrays, row)
            rows[key] = rows.get(key, 0) + 1
    hashes = np.sort(np.concatenate(test_hashes))
    found_in_training = 0
    for arrays in (arrays for shown in training for arrays in _chunks(shown, seed)):
        found = _hashes(arrays)
        nearest = np.minimum(np.searchsorted(hashes, found), len(hashes) - 1)
        for row in np.flatnonzero(hashes[nearest] == found).tolist():
            found_in_training += rows.pop(_row_bytes(arrays, row), 0)
        if not rows:
            break
    return Overlap(found_in_training, examples, training_examples)


def _share_a_length(one: Task, other: Task) -> bool:
    (shortest, longest), (other_shortest, other_longest) = one.length_range, other.length_range
    return shortest <= other_longest and other_shortest <= longest


def _chunks(shown: Shown, seed: int) -> Iterator[Arrays]:
    step = max(1, _CHUNK_TOKENS // shown.task.sequence_length)
    for start in range(0, len(shown.indices), step):
        part = shown.indices[start : start + step]
        yield shown.task.arrays(seed, part.start, len(part))


def _row_bytes(arrays: Arrays, row: int) -> bytes:
    return arrays.input_ids[row, : arrays.lengths[row]].tobytes()


def _hashes(arrays: Arrays) -> rng.Words:
    """A 64-bit hash of each example; [n]. Padding adds nothing, so the width of the batch does not matter."""
    ids = arrays.input_ids
    position = np.arange(1, ids.shape[1] + 1, dtype=np.uint64) << np.uint64(32)
    mixed = rng.mix(ids.astype(np.uint64) | position)
    mixed[np.arange(ids.shape[1]) >= arrays.lengths[:, None]] = 0
    hashes: rng.Words = mixed.sum(axis=1, dtype=np.uint64)
    return hashes
