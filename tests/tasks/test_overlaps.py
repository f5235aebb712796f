"""The share of test examples that training has shown, against sets of whole examples."""

from __future__ import annotations

import pytest

from traformer.errors import InputError
from traformer.tasks import Copy, FlipFlop, Induction, Instructions, Overlap, Shown, Task, overlap
from traformer.tasks.overlaps import _CHUNK_TOKENS


def rows(task: Task, seed: int, count: int) -> list[tuple]:
    arrays = task.arrays(seed, 0, count)
    return [tuple(ids[:n]) for ids, n in zip(arrays.input_ids.tolist(), arrays.lengths.tolist(), strict=True)]


def by_sets(training: Task, test: Task, seed: int, examples: int, training_examples: int) -> int:
    shown = set(rows(training, seed, training_examples))
    return sum(row in shown for row in rows(test, Task.test_seed(seed), examples))


@pytest.mark.parametrize(
    ("training", "test"),
    [
        (Copy("binary", max_length=12), Copy("binary", max_length=12)),
        (Copy("binary", max_length=12), Copy("binary", min_length=8, max_length=14)),
        (Copy("letters", max_length=6), Copy("letters", max_length=6)),
        (FlipFlop(length=16), FlipFlop(length=16)),
        (Induction(max_length=3, symbols=6), Induction(max_length=3, symbols=6)),
        (Instructions(max_length=4, symbols=3), Instructions(max_length=4, symbols=3)),
    ],
)
def test_equals_the_sets(training: Task, test: Task) -> None:
    found = overlap([Shown(training, range(5000))], test, seed=3, examples=400)
    expected = by_sets(training, test, 3, 400, 5000)
    assert found == Overlap(expected, 400, 5000)
    assert 0 < expected < 400 and found.share == expected / 400


def test_over_several_chunks() -> None:
    task = Copy("binary", min_length=10, max_length=10)
    training_examples = 2 * _CHUNK_TOKENS // task.sequence_length + 17
    found = overlap([Shown(task, range(training_examples))], task, seed=0, examples=300)
    assert found.shared == 300  # 1024 strings, tens of thousands of draws
    with_few = overlap([Shown(task, range(500))], task, seed=0, examples=300)
    assert with_few.shared == by_sets(task, task, 0, 300, 500)


def test_examples_of_several_tasks() -> None:
    short, whole = Copy("binary", max_length=6), Copy("binary", max_length=9)
    shown = [Shown(short, range(64)), Shown(whole, range(64, 128))]
    test = Copy("binary", min_length=5, max_length=9)
    seen = set(rows(short, 3, 64)) | set(rows(whole, 3, 128)[64:])
    expected = sum(row in seen for row in rows(test, Task.test_seed(3), 400))
    assert 0 < expected < 400 and overlap(shown, test, seed=3, examples=400) == Overlap(expected, 400, 128)


def test_long_examples_do_not_recur() -> None:
    shown = [Shown(Copy(), range(2000))]
    assert overlap(shown, Copy().at_length(20, 50), 0, 200).shared == 0
    assert overlap(shown, Copy().at_length(51, 100), 0, 200) == Overlap(0, 200, 2000)  # no length in common


def test_bad_input() -> None:
    with pytest.raises(InputError, match="training and test do not share a vocabulary"):
        overlap([Shown(Copy("binary"), range(10))], Copy("letters"), 0, 10)
    with pytest.raises(InputError, match="training and test do not share a vocabulary"):
        overlap([Shown(Copy(vocabulary=60), range(10))], Copy(vocabulary=61), 0, 10)
    with pytest.raises(InputError, match=r"^examples 0 is too small"):
        overlap([Shown(Copy(), range(10))], Copy(), 0, 0)
    with pytest.raises(InputError, match=r"^training_examples 0 is too small"):
        overlap([Shown(Copy(), range(0))], Copy(), 0, 10)
