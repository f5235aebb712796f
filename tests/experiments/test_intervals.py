"""Intervals over a few seeds: quantiles against the printed tables, and coverage by simulation."""

from __future__ import annotations

import numpy as np
import pytest

from traformer.experiments.intervals import difference_of_means, t_quantile, widened
from traformer.experiments.protocol import Counts, difference_interval, seed_interval


@pytest.mark.parametrize(
    "freedom,quantile", [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (9, 2.262), (30, 2.042)]
)  # fmt: skip
def test_quantiles_of_students_t(freedom, quantile):
    assert t_quantile(freedom) == pytest.approx(quantile, abs=6e-4)


def test_five_seeds_cover_their_mean_in_95_percent_of_cases():
    generator = np.random.default_rng(0)
    hits = {"mean": 0, "shares": 0, "resampled": 0}
    for _ in range(400):
        values = generator.normal(0.8, 0.05, size=5)
        low, high = difference_of_means(values, [0.0] * 5, paired=True)
        hits["mean"] += low <= 0.8 <= high
        draws = values[generator.integers(5, size=(2000, 5))].mean(axis=1)
        low, high = np.quantile(widened(draws, 5), [0.025, 0.975])
        hits["resampled"] += low <= 0.8 <= high
        low, high = seed_interval(Counts(tuple(generator.binomial(512, values.clip(0, 1))), (512,) * 5))
        hits["shares"] += low <= 0.8 <= high
    assert all(0.92 < count / 400 < 0.99 for count in hits.values()), hits


def test_differences_of_means():
    a, b = [1.0, 2.0, 3.0, 4.0, 5.0], [0.9, 1.9, 2.9, 3.9, 4.9]
    assert difference_of_means(a, b, paired=True) == pytest.approx((0.1, 0.1))
    low, high = difference_of_means(a, b, paired=False)  # two standard errors of 0.707 each, t of 4
    assert (low, high) == pytest.approx((0.1 - 2.7764, 0.1 + 2.7764), abs=1e-3)
    assert difference_of_means(b, a, paired=False) == pytest.approx((-high, -low))
    with pytest.raises(ValueError, match="at least two"):
        difference_of_means([1.0], [2.0, 3.0], paired=False)


def test_intervals_stay_within_what_is_possible():
    sure, never, half = (
        Counts((512,) * 5, (512,) * 5),
        Counts((0,) * 5, (512,) * 5),
        Counts((0, 512, 0, 512, 0), (512,) * 5),
    )
    assert seed_interval(half) == (0.0, pytest.approx(1.0, abs=0.05))
    for counts in (sure, never, half):
        low, high = seed_interval(counts)
        assert 0 <= low < high <= 1
    low, high = difference_interval(sure, never)
    assert 0.99 < low < high <= 1
