"""Examples with more irrelevant tokens: same answers, same deciding keys, and still examples of the task."""

from __future__ import annotations

import numpy as np
import pytest

from traformer.tasks import Copy, FlipFlop, Induction, Recall, Task
from traformer.tasks.growing import grow
from traformer.tasks.tokens import FIRST_SYMBOL

TASKS = [FlipFlop(length=16), Induction(max_length=10), Recall(length=40, pairs=3)]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
@pytest.mark.parametrize("count", [0, 2, 30])
def test_answers_and_what_decides_them_stay(task: Task, count: int) -> None:
    for number in range(8):
        example = task.arrays(Task.test_seed(0), number, 1)
        found = grow(task, example, count)
        assert found is not None
        grown, place = found
        size = int(example.lengths[0])
        assert int(grown.lengths[0]) == size + count == grown.input_ids.shape[1]
        kept = np.r_[0:place, place + count : size + count]
        assert grown.input_ids[0, kept].tolist() == example.input_ids[0, :size].tolist()
        assert not grown.answers[0, place : place + count].any()
        before, after = example.answers[0].nonzero()[0], grown.answers[0].nonzero()[0]
        assert len(before) == len(after) and after[-1] >= place + count
        for old, new in zip(before, after, strict=True):
            sources = int(example.sources[0, old]), int(grown.sources[0, new])
            assert example.input_ids[0, sources[0]] == grown.input_ids[0, sources[1]]
        assert int(grown.sources[0, after[-1]]) < place  # the new tokens are between an answer and what decides it


def test_a_longer_example_holds_the_shorter_ones_tokens() -> None:
    task = FlipFlop(length=16)
    example = task.arrays(Task.test_seed(0), 0, 1)
    short, long = (grow(task, example, count) for count in (10, 20))
    assert short is not None and long is not None
    assert long[0].input_ids[0, :24].tolist() == short[0].input_ids[0, :24].tolist()


def test_what_is_added_bears_on_no_answer() -> None:
    example = TASKS[0].arrays(Task.test_seed(0), 0, 1)
    grown = grow(TASKS[0], example, 40)
    assert grown is not None and set(grown[0].input_ids[0, 14:54:2].tolist()) == {3}  # ignore, always
    induction = Induction(max_length=10, symbols=3)
    for number in range(20):
        found = grow(induction, induction.arrays(Task.test_seed(0), number, 1), 50)
        assert found is not None
        ids, place = found[0].input_ids[0], found[1]
        added = ids[place : place + 50]
        assert ids[int(found[0].lengths[0]) - 3] not in added and added.min() >= FIRST_SYMBOL
        assert added.max() < FIRST_SYMBOL + 3


def test_where_nothing_is_irrelevant() -> None:
    assert grow(Copy(max_length=5), Copy(max_length=5).arrays(0, 0, 1), 4) is None
    assert grow(FlipFlop(length=16), FlipFlop(length=16).arrays(0, 0, 1), 3) is None  # half a pair
    assert grow(Recall(data=(), length=10), Recall(data=(), length=10).arrays(0, 0, 1), 4) is None
