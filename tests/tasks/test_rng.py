"""The random numbers: known values, independence of how they are asked for, and no visible pattern."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from traformer.tasks import rng

GOLDEN = 0x9E3779B97F4A7C15


def test_published_splitmix64_values() -> None:
    # The first outputs of splitmix64 from state 0.
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    states = [(step * GOLDEN) % 2**64 for step in (1, 2, 3)]
    assert [rng.mix_int(state) for state in states] == expected
    assert rng.mix(np.array(states, dtype=np.uint64)).tolist() == expected


@given(st.integers(0, 2**64 - 1))
def test_scalar_and_array_agree(value: int) -> None:
    assert rng.mix(np.array([value], dtype=np.uint64)).tolist() == [rng.mix_int(value)]


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**62), st.integers(1, 50))
def test_keys_are_random_access(seed: int, start: int, count: int) -> None:
    key = rng.stream_key(seed, 1, 2)
    together = rng.example_keys(key, start, count).tolist()
    assert together == [rng.example_keys(key, start + i, 1).item() for i in range(count)]


def test_wider_rows_start_alike() -> None:
    keys = rng.example_keys(rng.stream_key(0), 0, 5)
    assert np.array_equal(rng.draw_row(keys, 3, 4), rng.draw_row(keys, 3, 9)[:, :4])
    before = keys.copy()
    rng.draw(keys, 1)
    assert np.array_equal(keys, before)  # drawing leaves the keys as they were


def test_seeds_streams_purposes_and_positions_differ() -> None:
    values = set()
    for seed in range(6):
        for stream in range(6):
            keys = rng.example_keys(rng.stream_key(seed, stream), 0, 20)
            for purpose in range(5):
                values.update(rng.draw(keys, purpose).tolist())
                values.update(rng.draw_row(keys, purpose, 10).ravel().tolist())
    assert len(values) == 6 * 6 * 20 * 5 * 11
    assert rng.stream_key(0, 1, 2) != rng.stream_key(0, 2, 1)


@pytest.mark.parametrize("bound", [1, 2, 3, 63, 64, 1000])
def test_below_is_uniform(bound: int) -> None:
    keys = rng.example_keys(rng.stream_key(7, bound), 0, 300)
    drawn = rng.below(rng.draw_row(keys, 0, 1000), bound)
    counts = np.bincount(drawn.ravel(), minlength=bound)
    assert drawn.min() >= 0 and counts.size == bound
    expected = drawn.size / bound
    chi_square = ((counts - expected) ** 2).sum() / expected
    assert chi_square < bound - 1 + 4.5 * (2 * max(bound - 1, 1)) ** 0.5


def test_below_takes_a_bound_per_example() -> None:
    words = rng.draw_row(rng.example_keys(rng.stream_key(0), 0, 3), 0, 500)
    drawn = rng.below(words, np.array([[1], [5], [50]]))
    assert drawn.max(axis=1).tolist() == [0, 4, 49]
    assert np.array_equal(drawn[1], rng.below(words[1], 5))


def test_every_bit_is_fair_and_neighbours_are_independent() -> None:
    words = rng.draw_row(rng.example_keys(rng.stream_key(3), 0, 200), 0, 500)
    for bit in range(64):
        ones = (words >> np.uint64(bit)) & np.uint64(1)
        deviation = 0.5 / ones.size**0.5
        assert abs(ones.mean() - 0.5) < 4.5 * deviation
        assert abs((ones[:, 1:] == ones[:, :-1]).mean() - 0.5) < 4.5 * deviation  # next position
        assert abs((ones[1:] == ones[:-1]).mean() - 0.5) < 4.5 * deviation  # next example
