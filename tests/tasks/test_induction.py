"""induction against its definition, example by example."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traformer.errors import InputError
from traformer.tasks import Induction
from traformer.tasks.induction import expected_commonest_share

PAD, BOS, SEP, EOS = range(4)


def check_batch(task: Induction, seed: int, start: int, count: int) -> None:
    batch = task.examples(seed, start, count)
    for row, length in enumerate(batch.lengths.tolist()):
        ids = batch.input_ids[row].tolist()
        assert ids[length:] == [PAD] * (len(ids) - length)
        split = ids.index(SEP)
        context, query, answer = ids[1:split], ids[split + 1], ids[split + 2]
        assert ids[:length] == [BOS, *context, SEP, query, answer, EOS]
        assert task.min_length <= len(context) <= task.max_length
        assert all(4 <= symbol < task.vocab_size for symbol in context)
        assert context.count(query) == 1 and context[-1] != query
        place = context.index(query)
        assert answer == context[place + 1]
        assert batch.answers[row].nonzero().flatten().tolist() == [split + 2]
        sources = batch.sources[row].tolist()
        assert sources.pop(split + 2) == 1 + place + 1
        assert set(sources) == {-1}


@pytest.mark.parametrize("lengths", [(2, 2), (2, 3), (2, 50), (51, 100), (300, 300)])
def test_follows_the_definition(lengths: tuple[int, int]) -> None:
    check_batch(Induction(min_length=lengths[0], max_length=lengths[1]), seed=5, start=7, count=300)


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 20), st.integers(0, 20), st.integers(2, 70), st.integers(0, 2**63 - 1), st.integers(0, 2**40))
def test_follows_the_definition_at_any_setting(low: int, more: int, symbols: int, seed: int, start: int) -> None:
    check_batch(Induction(min_length=low, max_length=low + more, symbols=symbols), seed, start, count=5)


def chi_square(counts: np.ndarray) -> float:
    expected = counts.sum() / counts.size
    return float(((counts - expected) ** 2).sum() / expected)


def test_distributions() -> None:
    count, length = 20_000, 9
    arrays = Induction(min_length=length, max_length=length).arrays(seed=1, start=0, count=count)
    query, answer = arrays.input_ids[:, length + 2] - 4, arrays.input_ids[:, length + 3] - 4
    place = arrays.sources.max(axis=1) - 2
    assert chi_square(np.bincount(query, minlength=64)) < 104  # 63 degrees of freedom, p = 0.001
    assert chi_square(np.bincount(answer, minlength=64)) < 104
    assert chi_square(np.bincount(place, minlength=length - 1)) < 24.4  # 7 degrees of freedom
    assert place.max() == length - 2
    lengths = Induction(max_length=20).arrays(seed=1, start=0, count=count).lengths - 5
    assert chi_square(np.bincount(lengths, minlength=21)[2:]) < 42.4  # 18 degrees of freedom


@pytest.mark.parametrize(("draws", "symbols"), [(1, 1), (1, 5), (3, 3), (6, 2), (5, 4)])
def test_expected_commonest_share_by_enumeration(draws: int, symbols: int) -> None:
    outcomes = list(itertools.product(range(symbols), repeat=draws))
    mean = sum(max(Counter(outcome).values()) for outcome in outcomes) / len(outcomes) / draws
    assert expected_commonest_share(draws, symbols) == pytest.approx(mean, abs=1e-10)


def test_expected_commonest_share_of_very_long_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = expected_commonest_share(18_000, 63)
    expected_commonest_share.cache_clear()
    monkeypatch.setattr("traformer.tasks.induction._NORMAL_FROM", 0)
    assert expected_commonest_share(18_000, 63) == pytest.approx(exact, rel=5e-3)
    expected_commonest_share.cache_clear()
    # The largest of two standard normal numbers has mean 1 / sqrt(pi).
    assert expected_commonest_share(10**9, 2) == pytest.approx(0.5 + (np.pi * 2e9) ** -0.5, rel=1e-9)
    expected_commonest_share.cache_clear()


@pytest.mark.parametrize(("low", "high"), [(2, 2), (2, 20), (51, 60), (300, 300)])
def test_chance_is_what_an_order_blind_guess_reaches(low: int, high: int) -> None:
    task = Induction(min_length=low, max_length=high)
    arrays = task.arrays(seed=2, start=0, count=4000)
    hits = 0
    for ids, length in zip(arrays.input_ids.tolist(), arrays.lengths.tolist(), strict=True):
        context, query, answer = ids[1 : length - 4], ids[length - 3], ids[length - 2]
        guess = Counter(sorted(symbol for symbol in context if symbol != query)).most_common(1)[0][0]
        hits += guess == answer
    chance = task.chance()
    assert abs(hits / 4000 - chance) < 4.5 * (chance * (1 - chance) / 4000) ** 0.5 + 1e-12


def test_splits_and_text() -> None:
    task = Induction()
    assert task.vocab_size == 68 and task.sequence_length == 55
    assert [s.length for s in task.test_splits()] == ["2-50", "51-100", "101-150", "151-200", "201-250", "251-300"]
    assert [s.task.length_range for s in task.test_splits([20, "30-40"])] == [(20, 20), (30, 40)]
    batch = task.examples(0, 0, 1)
    text = task.format(batch, 0)
    assert text.startswith("<bos> ") and text.endswith("] <eos>") and text.count("[") == 1
    assert task.encode(task.decode(batch.input_ids[0])) == batch.input_ids[0, : batch.lengths[0]].tolist()


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ({"max_length": 1}, "max_length 1 is too short; induction needs at least 2 symbols"),
        ({"min_length": 1}, "min_length 1 is too short; induction needs at least 2 symbols"),
        ({"min_length": 60}, "min_length 60 is greater than max_length 50; give a smaller min_length"),
        ({"max_length": "50"}, "max_length must be a whole number, not '50'"),
        (
            {"symbols": 1},
            "symbols 1 is too small; induction needs another symbol beside the queried one, so give at least 2",
        ),
    ],
)
def test_bad_settings(setting: dict, sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        Induction(**setting)
    assert str(caught.value) == sentence
