"""copy against its definition, example by example."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traformer.errors import InputError
from traformer.tasks import Copy

PAD, BOS, SEP, EOS = range(4)


def check_batch(task: Copy, seed: int, start: int, count: int) -> None:
    batch = task.examples(seed, start, count)
    for row, tokens in enumerate(batch.lengths.tolist()):
        ids, answers, sources = (x[row].tolist() for x in (batch.input_ids, batch.answers, batch.sources))
        assert ids[tokens:] == [PAD] * (len(ids) - tokens)
        n = ids.index(SEP) - 1
        string = ids[1 : n + 1]
        assert task.min_length <= n <= task.max_length
        assert ids[:tokens] == [BOS, *string, SEP, *string, EOS]
        assert all(4 <= symbol < task.vocab_size for symbol in string)
        if task.alphabet == "unique":
            assert len(set(string)) == n
        assert answers == [n + 2 <= t <= 2 * n + 2 for t in range(len(ids))]
        # The i-th copied symbol comes from the i-th of the string; <eos> from nowhere.
        assert sources == [t - (n + 1) if n + 2 <= t <= 2 * n + 1 else -1 for t in range(len(ids))]


@pytest.mark.parametrize("alphabet", ["unique", "letters", "binary"])
@pytest.mark.parametrize("lengths", [(1, 1), (1, 2), (2, 2), (1, 50), (251, 300)])
def test_follows_the_definition(alphabet: str, lengths: tuple[int, int]) -> None:
    check_batch(Copy(alphabet, min_length=lengths[0], max_length=lengths[1]), seed=9, start=3, count=200)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(["unique", "letters", "binary"]),
    st.integers(1, 20),
    st.integers(0, 20),
    st.integers(0, 30),
    st.integers(0, 2**63 - 1),
)
def test_follows_the_definition_at_any_setting(alphabet: str, low: int, more: int, spare: int, seed: int) -> None:
    vocabulary = low + more + spare if alphabet == "unique" else None
    check_batch(Copy(alphabet, low + more, low, vocabulary), seed, start=0, count=5)


def chi_square(counts: np.ndarray) -> float:
    expected = counts.sum() / counts.size
    return float(((counts - expected) ** 2).sum() / expected)


def test_lengths_are_uniform() -> None:
    lengths = (Copy().arrays(seed=0, start=0, count=20_000).lengths - 3) // 2
    assert lengths.min() == 1 and lengths.max() == 50
    assert chi_square(np.bincount(lengths, minlength=51)[1:]) < 85.4  # 49 degrees of freedom, p = 0.001


@pytest.mark.parametrize(("alphabet", "symbols", "limit"), [("letters", 26, 52.6), ("binary", 2, 10.8)])
def test_symbols_are_uniform_with_repetition(alphabet: str, symbols: int, limit: float) -> None:
    ids = Copy(alphabet, min_length=6, max_length=6).arrays(seed=0, start=0, count=20_000).input_ids[:, 1:7] - 4
    for column in range(6):
        assert chi_square(np.bincount(ids[:, column], minlength=symbols)) < limit
    same = (ids[:, :-1] == ids[:, 1:]).mean()  # neighbours are independent
    assert abs(same - 1 / symbols) < 5 * (1 / symbols / 100_000) ** 0.5


def test_every_order_of_unique_symbols_is_equally_likely() -> None:
    ids = Copy("unique", min_length=3, max_length=3, vocabulary=5).arrays(seed=4, start=0, count=30_000).input_ids
    codes = (ids[:, 1:4] - 4) @ np.array([25, 5, 1])
    values, counts = np.unique(codes, return_counts=True)
    assert len(values) == 5 * 4 * 3
    assert chi_square(counts) < 98.3  # 59 degrees of freedom, p = 0.001


def test_a_vocabulary_that_is_used_up() -> None:
    ids = Copy("unique", min_length=7, max_length=7, vocabulary=7).arrays(seed=4, start=0, count=50).input_ids
    assert (np.sort(ids[:, 1:8], axis=1) == np.arange(4, 11)).all()
    one = Copy("unique", max_length=1, vocabulary=1).arrays(0, 0, 2).input_ids
    assert one.tolist() == [[BOS, 4, SEP, 4, EOS]] * 2


def test_vocabulary_reaches_the_longest_test() -> None:
    assert Copy().vocab_size == 404 and Copy(max_length=20).vocab_size == 304
    assert Copy("letters").vocab_size == 30 and Copy("binary").vocab_size == 6
    assert Copy(max_length=300, vocabulary=300).sequence_length == 603
    for split in Copy(max_length=20).test_splits("20,160,300"):
        assert split.task.vocab_size == 304


def test_splits() -> None:
    assert [s.length for s in Copy().test_splits()] == ["1-50", "51-100", "101-150", "151-200", "201-250", "251-300"]
    assert [s.task.length_range for s in Copy("letters", max_length=20).test_splits("20,40-80")] == [(20, 20), (40, 80)]
    assert [s.length for s in Copy(max_length=10, vocabulary=25).test_splits()] == ["1-10", "11-20"]
    with pytest.raises(InputError) as caught:
        Copy().test_splits([500])
    assert str(caught.value) == (
        "vocabulary 400 is too small for 500 unique symbols; train with a vocabulary of at least 500, or keep to "
        "lengths up to 400"
    )


def test_text() -> None:
    task = Copy("letters", max_length=3)
    assert task.decode([1, 5, 4, 2, 5, 4, 3, 0]) == "<bos> b a <sep> b a <eos>"
    assert Copy("binary").decode([1, 5, 4, 2]) == "<bos> 1 0 <sep>"
    assert Copy("unique").decode([1, 4, 403]) == "<bos> 0 399"


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ({"alphabet": "letter"}, "unknown alphabet 'letter'; did you mean 'letters'? Known: unique, letters, binary"),
        ({"min_length": 0}, "min_length 0 is too short; copy needs at least 1 symbols"),
        ({"max_length": 0}, "max_length 0 is too short; copy needs at least 1 symbols"),
        ({"min_length": 51}, "min_length 51 is greater than max_length 50; give a smaller min_length"),
        (
            {"alphabet": "binary", "vocabulary": 2},
            "vocabulary is for alphabet 'unique'; leave it out with alphabet 'binary'",
        ),
        ({"vocabulary": 0}, "vocabulary 0 is too small; there must be a symbol to copy, so give at least 1"),
        ({"vocabulary": 99.5}, "vocabulary must be a whole number, not 99.5"),
    ],
)
def test_bad_settings(setting: dict, sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        Copy(**setting)
    assert str(caught.value) == sentence


def test_chance_is_that_of_a_random_order():
    assert Copy(max_length=3, min_length=3, vocabulary=8).chance() == pytest.approx(1 / 6)
    assert Copy(max_length=3, min_length=3, vocabulary=8).chance("token_accuracy") == pytest.approx(2 / 4)
    assert Copy(max_length=2, min_length=1, alphabet="binary").chance() == pytest.approx((1 / 2 + 1 / 4) / 2)
    assert Copy(max_length=2, min_length=2, alphabet="binary").chance("token_accuracy") == pytest.approx(2 / 3)
