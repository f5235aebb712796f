"""instructions against plain Python string operations."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traformer.errors import InputError
from traformer.tasks import Algorithmic, Instructions
from traformer.tasks.instructions import instruction_names

PAD, BOS, SEP, EOS = range(4)
NAMES = ["copy", "reverse", "first", "last", "right_of", "left_of"]


def check_batch(task: Instructions, seed: int, start: int, count: int) -> Counter[tuple[int, str]]:
    """Redo every example by hand; returns how often each (length, instruction) came."""
    batch = task.examples(seed, start, count)
    seen: Counter[tuple[int, str]] = Counter()
    names = instruction_names(batch)
    assert batch.input_ids.shape[1] <= task.sequence_length
    for row, tokens in enumerate(batch.lengths.tolist()):
        ids, answers, sources = (x[row].tolist() for x in (batch.input_ids, batch.answers, batch.sources))
        assert ids[tokens:] == [PAD] * (len(ids) - tokens) and PAD not in ids[:tokens]
        name = NAMES[ids[1] - 4]
        assert name == names[row] and name in task.instructions
        n = ids.index(SEP) - 2
        string = ids[2 : n + 2]
        assert task.min_length <= n <= task.max_length
        assert all(10 <= symbol < task.vocab_size for symbol in string)
        query: list[int] = []
        if name in ("right_of", "left_of"):
            query = [ids[n + 3]]
            assert string.count(query[0]) == 1
            place = string.index(query[0]) + (1 if name == "right_of" else -1)
            places = [place]
        else:
            whole = list(range(n))
            places = {"copy": whole, "reverse": whole[::-1], "first": [0], "last": [n - 1]}[name]
        assert all(0 <= place < n for place in places)
        expected = [BOS, ids[1], *string, SEP, *query, *(string[place] for place in places), EOS]
        assert ids[:tokens] == expected
        first = n + 3 + len(query)
        assert answers == [first <= t < tokens for t in range(len(ids))]
        padding = [-1] * (len(ids) - tokens)
        assert sources == [-1] * first + [place + 2 for place in places] + [-1] + padding
        seen[n, name] += 1
    return seen


def test_follows_the_definition() -> None:
    seen = check_batch(Instructions(), seed=1, start=0, count=3000)
    assert {name for _, name in seen} == set(NAMES)
    check_batch(Instructions(min_length=51, max_length=500), seed=1, start=0, count=60)


def test_an_instruction_without_an_answer_is_not_drawn() -> None:
    seen = check_batch(Instructions(max_length=2), seed=2, start=0, count=6000)
    at = {n: {name: count for (length, name), count in seen.items() if length == n} for n in range(3)}
    assert set(at[0]) == {"copy", "reverse"}
    assert set(at[1]) == {"copy", "reverse", "first", "last"}
    assert set(at[2]) == set(NAMES)
    for counts in at.values():  # lengths uniform, then instructions uniform among those that can be
        total = sum(counts.values())
        assert abs(total - 2000) < 4.5 * (6000 * 2 / 9) ** 0.5
        expected = total / len(counts)
        assert sum((c - expected) ** 2 / expected for c in counts.values()) < 20.6  # 5 degrees of freedom, p = 0.001


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length", [0, 1, 2, 3])
def test_single_instruction_at_tiny_lengths(name: str, length: int) -> None:
    shortest = {"copy": 0, "reverse": 0, "first": 1, "last": 1, "right_of": 2, "left_of": 2}[name]
    if length < shortest:
        with pytest.raises(InputError, match=f"min_length {length} is too short; {name} have an answer"):
            Instructions(min_length=length, max_length=3, instructions=(name,))
        return
    task = Instructions(min_length=length, max_length=length, instructions=(name,))
    check_batch(task, seed=0, start=0, count=50)
    assert task.examples(0, 0, 50).input_ids.shape[1] == task.sequence_length


@settings(deadline=None, max_examples=80)
@given(
    st.lists(st.sampled_from(NAMES), min_size=1, unique=True),
    st.integers(0, 12),
    st.integers(0, 12),
    st.integers(2, 70),
    st.integers(0, 2**63 - 1),
)
def test_follows_the_definition_at_any_setting(names: list[str], low: int, more: int, symbols: int, seed: int) -> None:
    least = min({"copy": 0, "reverse": 0, "first": 1, "last": 1}.get(name, 2) for name in names)
    low = max(low, least)
    check_batch(Instructions(low + more, low, tuple(names), symbols), seed, start=5, count=6)


def test_places_and_symbols_are_uniform() -> None:
    task = Instructions(min_length=6, max_length=6, instructions=("left_of",), symbols=8)
    arrays = task.arrays(seed=3, start=0, count=10_000)
    for values, size, limit in (
        (arrays.sources.max(axis=1) - 2, 5, 18.5),  # the answer's place: all but the last
        (arrays.input_ids[:, 9] - 10, 8, 24.4),  # the queried symbol
        (arrays.input_ids[:, 10] - 10, 8, 24.4),  # the answer
    ):
        counts = np.bincount(values, minlength=size)
        assert counts.size == size
        assert ((counts - 10_000 / size) ** 2).sum() / (10_000 / size) < limit


def test_ids_do_not_depend_on_which_instructions_are_used() -> None:
    task = Instructions(instructions=("left_of", "reverse"), min_length=2)
    assert task.instructions == ("reverse", "left_of")
    assert task.vocab_size == Instructions().vocab_size == 74
    assert set(instruction_names(task.examples(0, 0, 50))) == {"reverse", "left_of"}
    assert Instructions(instructions="copy,first").instructions == ("copy", "first")  # type: ignore[arg-type]


def test_splits_group_by_instruction() -> None:
    splits = Instructions().test_splits()
    assert [s.length for s in splits] == ["0-50"] + [f"{50 * k + 1}-{50 * k + 50}" for k in range(1, 10)]
    for split in splits[:2]:
        assert split.group is not None
        batch = split.task.examples(0, 0, 20)
        assert split.group(batch) == [split.task.decode(ids).split()[1] for ids in batch.input_ids]


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        (
            {"instructions": ("copy", "revert")},
            "unknown instruction 'revert'; did you mean 'reverse'? Known: copy, reverse, first, last, right_of, "
            "left_of",
        ),
        (
            {"instructions": ()},
            "instructions must be one or more different names of copy, reverse, first, last, right_of, left_of",
        ),
        (
            {"instructions": ("copy", "copy")},
            "instructions must be one or more different names of copy, reverse, first, last, right_of, left_of",
        ),
        (
            {"instructions": ("first", "last")},
            "min_length 0 is too short; first and last have an answer from length 1 on, so give at least 1",
        ),
        ({"min_length": -1}, "min_length -1 is too short; instructions needs at least 0 symbols"),
        ({"symbols": 1}, "symbols 1 is too small; a queried symbol needs another one beside it, so give at least 2"),
    ],
)
def test_bad_settings(setting: dict, sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        Instructions(**setting)
    assert str(caught.value) == sentence


@pytest.mark.parametrize("instructions", [None, False, 3])
def test_instructions_that_are_no_names(instructions):
    with pytest.raises(InputError, match="instructions must be names of copy"):
        Instructions(instructions=instructions)


@pytest.mark.parametrize("name", [[1], {"copy": 1}, 3])
def test_a_name_that_is_no_word_is_refused(name):
    with pytest.raises(InputError, match="unknown instruction"):
        Instructions(instructions=[name])
    with pytest.raises(InputError, match="unknown problem"):
        Algorithmic(problem=name)
