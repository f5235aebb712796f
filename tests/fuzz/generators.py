"""Task generators: random access, ranges, sources, settings that come back from their text; or one sentence."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from hypothesis import strategies as st

from traformer.errors import TraformerError
from traformer.tasks import Copy, FlipFlop, Induction, Instructions, Recall, Task, build_task
from traformer.tasks.instructions import INSTRUCTIONS

_length = st.integers(0, 40)
_TASKS: dict[type[Task], dict[str, st.SearchStrategy[Any]]] = {
    FlipFlop: {"length": st.integers(1, 40).map(lambda n: 2 * n), "min_length": st.none() | _length,
               "p_ignore": st.floats(0.0, 1.0)},
    Copy: {"alphabet": st.sampled_from(["unique", "letters", "binary"]), "max_length": _length, "min_length": _length,
           "vocabulary": st.none() | st.integers(1, 90)},
    Induction: {"max_length": _length, "min_length": _length, "symbols": st.integers(1, 70)},
    Instructions: {"max_length": _length, "min_length": _length, "symbols": st.integers(1, 70),
                   "instructions": st.lists(st.sampled_from(INSTRUCTIONS),
                                            max_size=6)},
    Recall: {"length": st.integers(4, 80), "min_length": st.none() | st.integers(4, 80), "keys": st.integers(1, 40),
             "values": st.integers(1, 40), "min_pairs": st.integers(1, 10)},
}  # fmt: skip
# What a hand-written config may hold instead.
_nonsense = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.lists(st.integers(), max_size=3)
)


@st.composite
def example_cases(draw: st.DrawFn) -> tuple[str, dict[str, Any], int, int, list[int]]:
    """Task name, settings, seed, first index, sizes of consecutive batches."""
    kind = draw(st.sampled_from(list(_TASKS)))
    settings = draw(st.fixed_dictionaries({}, optional=_TASKS[kind]))
    cuts = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    return kind.name, settings, draw(st.integers(0, 2**63 - 1)), draw(st.integers(0, 2**50)), cuts


@st.composite
def setting_cases(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    kind = draw(st.sampled_from(list(_TASKS)))
    wild = {name: st.one_of(value, _nonsense) for name, value in _TASKS[kind].items()}
    settings: dict[str, Any] = draw(st.fixed_dictionaries({}, optional=wild))
    if draw(st.integers(0, 9)) == 0:
        settings[draw(st.text(max_size=8))] = draw(_nonsense)
    return kind.name, settings


def _built(name: str, settings: dict[str, Any]) -> Task | None:
    """The task, or None where it was refused in one sentence."""
    try:
        return build_task(name, settings)
    except TraformerError as error:
        assert "\n" not in str(error)
        return None


def check_settings(case: tuple[str, dict[str, Any]]) -> None:
    task = _built(*case)
    if task is None:
        return
    again = build_task(task.name, json.loads(json.dumps(task.to_options())))
    assert again == task
    # Names of all tokens, and examples, only where they are few: a vocabulary of 10^9 is legal, and fills the memory.
    if all(value <= 1000 for value in task.to_options().values() if isinstance(value, int)):
        _check(task, task.arrays(0, 0, 2))


def check_examples(case: tuple[str, dict[str, Any], int, int, list[int]]) -> None:
    name, settings, seed, start, cuts = case
    task = _built(name, settings)
    if task is None:
        return
    whole = task.arrays(seed, start, sum(cuts))
    _check(task, whole)
    row = 0
    for cut in cuts:
        part = task.arrays(seed, start + row, cut)
        for i in range(cut):
            length = int(part.lengths[i])
            assert length == whole.lengths[row + i]
            for a, b in (
                (part.input_ids, whole.input_ids),
                (part.answers, whole.answers),
                (part.sources, whole.sources),
            ):
                assert np.array_equal(a[i, :length], b[row + i, :length])
        row += cut
    text = task.decode(whole.input_ids[0])
    assert task.encode(text) == whole.input_ids[0, : int(whole.lengths[0])].tolist()


def _check(task: Task, arrays: Any) -> None:
    ids, answers, sources, lengths = arrays.input_ids, arrays.answers, arrays.sources, arrays.lengths
    assert ids.min() >= 0 and ids.max() < task.vocab_size
    assert lengths.max() <= task.sequence_length
    real = np.arange(ids.shape[1]) < lengths[:, None]
    assert np.array_equal(real, ids != task.pad_id)
    assert answers.any(1).all() and not answers[:, 0].any() and not (answers & ~real).any()
    rows, columns = np.nonzero(sources >= 0)
    origin = sources[rows, columns]
    assert answers[rows, columns].all() and (origin < columns).all()
    assert np.array_equal(ids[rows, origin], ids[rows, columns])
