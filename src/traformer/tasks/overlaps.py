"""How many test examples also occur in training: streams never share a seed, but short strings recur by chance."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from traformer.errors import InputError
from traformer.tasks import rng
from traformer.tasks.base import Arrays, Task
from traformer.tasks.checks import check_count

_CHUNK_TOKENS = 1 << 20


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


def overlap(training: Task, test: Task, seed: int, examples: int, training_examples: int) -> Overlap:
    """Count the first `examples` test examples (of `test_seed(seed)`) that occur among the first training examples.

    Exact: equal hashes only select the candidates, which are then compared token by token.
    """
    examples = check_count("examples", examples, 1, "a share is counted on examples")
    training_examples = check_count("training_examples", training_examples, 1, "a share is counted on examples")
    if training.name != test.name or training.token_names != test.token_names:
        raise InputError("training and test do not share a vocabulary; take the test task from training.test_splits()")
    first, last = (task.length_range for task in (training, test))
    if first[1] < last[0] or last[1] < first[0]:  # no length in common
        return Overlap(0, examples, training_examples)
    rows: dict[bytes, int] = {}  # distinct test examples and how often each is drawn
    test_hashes = []
    for arrays in _chunks(test, Task.test_seed(seed), examples):
        test_hashes.append(_hashes(arrays))
        for row in range(len(arrays.lengths)):
            key = _row_bytes(arrays, row)
            rows[key] = rows.get(key, 0) + 1
    hashes = np.sort(np.concatenate(test_hashes))
    shared = 0
    for arrays in _chunks(training, seed, training_examples):
        found = _hashes(arrays)
        nearest = np.minimum(np.searchsorted(hashes, found), len(hashes) - 1)
        for row in np.flatnonzero(hashes[nearest] == found).tolist():
            shared += rows.pop(_row_bytes(arrays, row), 0)
        if not rows:
            break
    return Overlap(shared, examples, training_examples)


def _chunks(task: Task, seed: int, count: int) -> Iterator[Arrays]:
    step = max(1, _CHUNK_TOKENS // task.sequence_length)
    for start in range(0, count, step):
        yield task.arrays(seed, start, min(step, count - start))


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
