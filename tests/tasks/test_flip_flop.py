"""flip_flop against a memory simulated token by token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traformer.errors import InputError
from traformer.tasks import FlipFlop

WRITE, READ, IGNORE, ZERO, ONE = 1, 2, 3, 4, 5


def check_example(ids: list[int], answers: list[bool], sources: list[int]) -> None:
    """Walk the pairs with a one-bit memory; every token, answer and source must be what the definition says."""
    assert len(ids) % 2 == 0
    assert ids[0] == WRITE and ids[-2] == READ
    memory, written_at = None, None
    for t in range(0, len(ids), 2):
        instruction, bit = ids[t], ids[t + 1]
        assert instruction in (WRITE, READ, IGNORE) and bit in (ZERO, ONE)
        assert not answers[t] and sources[t] == -1
        if instruction == WRITE:
            memory, written_at = bit, t + 1
        if instruction == READ:
            assert bit == memory
            assert answers[t + 1] and sources[t + 1] == written_at
        else:
            assert not answers[t + 1] and sources[t + 1] == -1


def check_batch(task: FlipFlop, seed: int, start: int, count: int) -> None:
    batch = task.examples(seed, start, count)
    assert batch.input_ids.shape == batch.answers.shape == batch.sources.shape
    for row, length in enumerate(batch.lengths.tolist()):
        assert task.length_range[0] <= length <= task.length_range[1]
        check_example(*(field[row, :length].tolist() for field in (batch.input_ids, batch.answers, batch.sources)))
        assert (batch.input_ids[row, length:] == task.pad_id).all()
        assert not batch.answers[row, length:].any()
        assert (batch.sources[row, length:] == -1).all()


@pytest.mark.parametrize("p_ignore", [0.0, 0.1, 0.8, 0.98, 1.0])
@pytest.mark.parametrize("length", [4, 6, 128, 512])
def test_follows_the_definition(length: int, p_ignore: float) -> None:
    check_batch(FlipFlop(length=length, p_ignore=p_ignore), seed=3, start=100, count=200)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(2, 40),
    st.integers(0, 40),
    st.floats(0, 1),
    st.integers(0, 2**63 - 1),
    st.integers(0, 2**40),
)
def test_follows_the_definition_at_any_setting(low: int, more: int, p_ignore: float, seed: int, start: int) -> None:
    check_batch(FlipFlop(length=2 * (low + more), min_length=2 * low, p_ignore=p_ignore), seed, start, count=7)


def test_shortest_sequence_is_one_write_and_one_read() -> None:
    ids = FlipFlop(length=4).examples(0, 0, 400).input_ids
    assert {tuple(row) for row in ids.tolist()} == {(WRITE, bit, READ, bit) for bit in (ZERO, ONE)}


@pytest.mark.parametrize("p_ignore", [0.1, 0.8, 0.98])
def test_frequencies(p_ignore: float) -> None:
    task = FlipFlop(length=512, p_ignore=p_ignore)
    ids = task.arrays(seed=11, start=0, count=2000).input_ids
    inner = ids[:, 2:-2:2]  # the first and last instruction are fixed
    for token, expected in ((IGNORE, p_ignore), (WRITE, (1 - p_ignore) / 2), (READ, (1 - p_ignore) / 2)):
        deviation = (expected * (1 - expected) / inner.size) ** 0.5
        assert abs((inner == token).mean() - expected) < 4.5 * deviation
    free = ids[:, 1::2][ids[:, 0::2] != READ]
    assert abs((free == ONE).mean() - 0.5) < 4.5 * 0.5 / free.size**0.5
    # The bit tells nothing of its instruction, nor of the bit before.
    of_ignore = ids[:, 3::2][ids[:, 2::2] == IGNORE]
    assert abs((of_ignore == ONE).mean() - 0.5) < 4.5 * 0.5 / of_ignore.size**0.5
    if p_ignore > 0.5:
        both_ignored = (ids[:, 2:-2:2] == IGNORE) & (ids[:, 4::2] == IGNORE)
        same = (ids[:, 3:-2:2] == ids[:, 5::2])[both_ignored]
        assert abs(same.mean() - 0.5) < 4.5 * 0.5 / same.size**0.5


def test_lengths_are_uniform_over_even_numbers() -> None:
    lengths = FlipFlop(length=12, min_length=4).arrays(0, 0, 10_000).lengths
    values, counts = np.unique(lengths, return_counts=True)
    assert values.tolist() == [4, 6, 8, 10, 12]
    assert ((counts - 2000) ** 2 / 2000).sum() < 18.5  # chi-square, 4 degrees of freedom, p = 0.001


def test_ids_and_text() -> None:
    task = FlipFlop(length=8)
    assert task.vocab_size == 6 and task.pad_id == 0 and task.sequence_length == 8
    assert task.decode([1, 5, 3, 4, 2, 5, 0, 0]) == "w 1 i 0 r 1"
    assert task.encode("w 1 i 0 r 1") == [1, 5, 3, 4, 2, 5]


def test_splits() -> None:
    task = FlipFlop(length=64, p_ignore=0.7)
    splits = task.test_splits("64,512")
    assert [(s.name, s.length, s.size, s.task.p_ignore) for s in splits] == [
        (name, str(length), length, p)
        for length in (64, 512)
        for name, p in (("iid", 0.7), ("sparse", 0.98), ("dense", 0.1))
    ]
    assert [s.task.sequence_length for s in task.test_splits()] == [64] * 3 + [128] * 3 + [256] * 3
    ranged = task.test_splits(["66-128"])[0].task
    assert ranged.length_range == (66, 128)


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ({"length": 2}, "length 2 is too short; flip_flop needs at least 4 tokens"),
        ({"length": 7}, "length 7 is odd; flip_flop is made of pairs of tokens, give an even length"),
        (
            {"length": 8, "min_length": 5},
            "min_length 5 is odd; flip_flop is made of pairs of tokens, give an even min_length",
        ),
        ({"length": 8, "min_length": 2}, "min_length 2 is too short; flip_flop needs at least 4 tokens"),
        ({"length": 8, "min_length": 10}, "min_length 10 is greater than length 8; give a smaller min_length"),
        ({"length": 8.0}, "length must be a whole number, not 8.0"),
        ({"length": True}, "length must be a whole number, not True"),
        ({"p_ignore": 1.5}, "p_ignore must be a probability from 0 to 1, not 1.5"),
        ({"p_ignore": float("nan")}, "p_ignore must be a probability from 0 to 1, not nan"),
        ({"p_ignore": "0.8"}, "p_ignore must be a probability from 0 to 1, not '0.8'"),
    ],
)
def test_bad_settings(setting: dict, sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        FlipFlop(**setting)
    assert str(caught.value) == sentence


@pytest.mark.parametrize(("p_ignore", "length"), [(0.98, 256), (0.98, 512), (0.8, 64)])
def test_chance_is_that_of_saying_the_same_bit_always(p_ignore, length):
    task = FlipFlop(length=length, p_ignore=p_ignore)
    batch = task.examples(seed=7, start=0, count=20_000)
    always = ((batch.input_ids == ONE) | ~batch.answers).all(dim=1).double().mean().item()
    assert task.chance() == pytest.approx(always, abs=0.012)
    assert task.chance("token_accuracy") == 0.5
