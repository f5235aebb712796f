"""Intervals against known values and against direct sums; scores against loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from traformer.errors import InputError
from traformer.tasks import Copy, FlipFlop
from traformer.tasks.metrics import Scores, Tally, binomial_cdf, score, upper_bound, wilson


@pytest.mark.parametrize(
    ("successes", "total", "low", "high"),
    [(0, 10, 0.0, 0.27753), (10, 10, 0.72247, 1.0), (5, 10, 0.23659, 0.76341), (81, 263, 0.2553, 0.3662)],
)
def test_wilson_known_values(successes: int, total: int, low: float, high: float) -> None:
    assert wilson(successes, total) == pytest.approx((low, high), abs=5e-5)


@given(st.integers(1, 500), st.data())
def test_wilson_solves_its_equation(total: int, data: st.DataObject) -> None:
    """Each end is the rate whose distance to the share is 1.96 of its own standard deviations."""
    successes = data.draw(st.integers(0, total))
    for end in wilson(successes, total):
        distance = abs(successes / total - end)
        assert distance == pytest.approx(1.959963985 * math.sqrt(end * (1 - end) / total), abs=1e-9)


def test_upper_bound_known_values() -> None:
    assert upper_bound(0, 10) == pytest.approx(0.258866, abs=1e-6)  # 1 - 0.05**0.1
    assert upper_bound(0, 1_000_000) == pytest.approx(2.99573e-6, rel=1e-5)  # the rule of three
    assert upper_bound(1, 10) == pytest.approx(0.394163, abs=1e-6)
    assert upper_bound(10, 10) == 1.0
    assert upper_bound(5, 100) == pytest.approx(0.102253, abs=1e-6)
    # A one-sided bound at 97.5 % is the upper end of the two-sided 95 % interval.
    assert upper_bound(0, 10, 0.975) == pytest.approx(0.308497, abs=1e-6)
    assert upper_bound(5, 10, 0.975) == pytest.approx(0.812914, abs=1e-6)


@given(st.integers(1, 300), st.data())
def test_upper_bound_solves_its_equation(total: int, data: st.DataObject) -> None:
    events = data.draw(st.integers(0, total - 1))
    rate = upper_bound(events, total)
    direct = math.fsum(math.comb(total, k) * rate**k * (1 - rate) ** (total - k) for k in range(events + 1))
    assert direct == pytest.approx(0.05, rel=1e-9)


@given(st.integers(1, 200), st.floats(0.001, 0.999), st.data())
def test_binomial_cdf_is_the_sum(total: int, rate: float, data: st.DataObject) -> None:
    events = data.draw(st.integers(0, total))
    direct = math.fsum(math.comb(total, k) * rate**k * (1 - rate) ** (total - k) for k in range(events + 1))
    assert binomial_cdf(events, total, rate) == pytest.approx(direct, rel=1e-9, abs=1e-12)


def test_upper_bound_of_millions_is_quick_and_sane() -> None:
    bound = upper_bound(12_345, 10_000_000)
    normal = 0.0012345 + 1.645 * math.sqrt(0.0012345 / 10_000_000)
    assert bound == pytest.approx(normal, rel=1e-3) and bound > normal


@pytest.mark.parametrize("bad", [(1, 0), (0, 0), (3, 2), (-1, 2)])
def test_no_proportion(bad: tuple[int, int]) -> None:
    for function in (wilson, upper_bound):
        with pytest.raises(InputError, match=f"{bad[0]} of {bad[1]} is no proportion"):
            function(*bad)


def test_score_counts_answers_only() -> None:
    task = Copy("letters", max_length=6)
    batch = task.examples(0, 0, 20)
    perfect = batch.input_ids.masked_fill(~batch.answers, -1)
    assert score(perfect, batch).exact.all()
    generator = torch.Generator().manual_seed(0)
    wrong = torch.rand(perfect.shape, generator=generator) < 0.15
    guesses = torch.where(wrong, torch.zeros_like(perfect), perfect)  # id 0 is never an answer
    scores = score(guesses, batch)
    for row in range(20):
        answered = [t for t in range(perfect.shape[1]) if batch.answers[row, t]]
        right = [t for t in answered if not wrong[row, t]]
        assert scores.scored[row] == len(answered) and scores.correct[row] == len(right)
        assert bool(scores.exact[row]) == (right == answered)
    assert 0 < int(scores.exact.sum()) < 20
    with pytest.raises(InputError, match="predicted has shape"):
        score(perfect[:, 1:], batch)


def tally(correct: list[int], scored: list[int]) -> Tally:
    result = Tally()
    result.add(Scores(torch.tensor(correct), torch.tensor(scored)))
    return result


def test_tally() -> None:
    first, second = tally([3, 5, 0], [3, 6, 2]), tally([4], [4])
    both = first + second
    assert both == tally([3, 5, 0, 4], [3, 6, 2, 4])
    exact = both.exact_match()
    assert (exact.value, exact.count) == (0.5, 4) and (exact.low, exact.high) == wilson(2, 4)
    tokens = both.token_accuracy()
    assert tokens.value == 12 / 15 and tokens.count == 15 and tokens.low < 0.8 < tokens.high
    error = both.error_per_answer()
    assert (error.value, error.low, error.high, error.count) == (3 / 15, 0.0, upper_bound(3, 15), 15)
    with pytest.raises(InputError):
        Tally().exact_match()
    with pytest.raises(InputError):
        Tally().error_per_answer()


def test_no_error_still_has_a_bound() -> None:
    batch = FlipFlop(length=512).examples(0, 0, 32)
    result = Tally()
    result.add(score(batch.input_ids, batch))
    reads = int(batch.answers.sum())
    error = result.error_per_answer()
    assert error.value == 0.0 and error.high == pytest.approx(1 - 0.05 ** (1 / reads)) and error.count == reads
    assert result.exact_match().value == 1.0 and result.exact_match().low == wilson(32, 32)[0]


def test_token_interval_counts_sequences_when_errors_come_together() -> None:
    # Whole sequences right or wrong: 100 sequences of 50 tokens carry what 100 tokens would.
    clustered = tally([50] * 60 + [0] * 40, [50] * 100).token_accuracy()
    assert (clustered.low, clustered.high) == pytest.approx(wilson(60, 100), abs=2e-3)
    # Independent tokens: close to the interval of that many tokens.
    generator = torch.Generator().manual_seed(0)
    right = (torch.rand(400, 50, generator=generator) < 0.6).sum(1)
    independent = Tally()
    independent.add(Scores(right, torch.full_like(right, 50)))
    interval = independent.token_accuracy()
    width = wilson(int(right.sum()), 20_000)
    assert (interval.high - interval.low) == pytest.approx(width[1] - width[0], rel=0.1)
    # All right: as sure as so many sequences make one.
    assert tally([50] * 100, [50] * 100).token_accuracy().low == wilson(100, 100)[0]
