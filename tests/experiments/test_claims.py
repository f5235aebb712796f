"""The paper's two claims about length, on numbers made up for the purpose."""

from __future__ import annotations

import pytest

from traformer.experiments.claims import (
    NOT_TESTED,
    Target,
    error_cut,
    error_cut_by_sixty_percent,
    error_of_paper_peers_cut,
    error_per_read,
    every_seed,
    more_than_three_times_longer,
    reach,
)
from traformer.experiments.protocol import FAILS, HOLDS, UNDECIDED


def test_reach_ends_at_the_first_length_that_fails():
    assert reach({50: 1.0, 100: 0.96, 150: 0.94, 200: 1.0}) == 100
    assert reach({50: 0.9, 100: 1.0}) == 0
    assert reach({100: 1.0, 50: 1.0}) == 100


@pytest.mark.parametrize(
    ("accuracies", "outcome"),
    [
        ({50: 1.0, 150: 1.0, 200: 0.95}, HOLDS),
        ({50: 1.0, 150: 1.0, 200: 0.94}, FAILS),  # exactly 3 times is not more than 3 times
        ({50: 1.0, 150: 1.0}, NOT_TESTED),
    ],
)
def test_more_than_three_times_longer(accuracies, outcome):
    assert more_than_three_times_longer("t", "tra", accuracies, 50).outcome == outcome


def test_the_best_other_method_is_found_at_each_length():
    own = {50: 0.2, 100: 0.9, 200: 0.8}
    others = {"rope": {50: 1.0, 100: 0.5, 200: 0.0}, "fot": {50: 1.0, 100: 0.3, 200: 0.5}}
    cuts = error_cut(own, others, 50)
    assert cuts[100] == (pytest.approx(0.8), "rope") and cuts[200] == (pytest.approx(0.6), "fot") and 50 not in cuts


@pytest.mark.parametrize(
    ("own", "other", "outcome"),
    [
        ({100: 0.9, 200: 0.9}, {100: 0.5, 200: 0.5}, HOLDS),
        ({100: 0.9, 200: 0.7}, {100: 0.5, 200: 0.5}, FAILS),
        ({100: 0.9, 200: 1.0}, {100: 0.5, 200: 1.0}, HOLDS),  # nothing to cut at 200
        ({100: 0.9, 200: 0.9}, {100: 0.5, 200: 1.0}, FAILS),  # an error where the other has none
        ({100: 1.0, 200: 1.0}, {100: 1.0, 200: 1.0}, NOT_TESTED),
    ],
)
def test_error_cut(own, other, outcome):
    assert error_cut_by_sixty_percent("t", "tra", own, {"rope": other}, 50).outcome == outcome


def test_error_cut_of_the_papers_peers():
    """Asked a second time only where others were run beside them."""
    own, weak, strong = {100: 0.9}, {100: 0.5}, {100: 0.89}
    assert error_of_paper_peers_cut("t", "tra", own, {"rope": weak}, 50) is None
    assert error_of_paper_peers_cut("t", "tra", own, {"lstm": weak}, 50) is None
    others = {"rope": weak, "asentmax": strong}
    assert error_cut_by_sixty_percent("t", "tra", own, others, 50).outcome == FAILS
    verdict = error_of_paper_peers_cut("t", "tra", own, others, 50)
    assert verdict is not None and verdict.outcome == HOLDS and "80 % at 100 (rope)" in verdict.numbers


def test_error_cut_without_others():
    assert error_cut_by_sixty_percent("t", "tra", {100: 1.0}, {}, 50).outcome == NOT_TESTED


def test_the_worst_seed_at_the_worst_length_decides():
    target = Target(("tra",), 0.95, 100)
    assert every_seed("n", "tra", {50: 0.1, 100: 0.95, 150: 0.99}, target).outcome == HOLDS
    verdict = every_seed("n", "tra", {50: 1.0, 100: 1.0, 150: 0.94}, target)
    assert verdict.outcome == FAILS and "94.0 % at 150" in verdict.numbers
    assert every_seed("n", "tra", {50: 1.0}, target).outcome == NOT_TESTED


@pytest.mark.parametrize(
    ("reads", "outcome"),
    [
        ({512: (0, 40_000), 2048: (0, 100_000)}, HOLDS),
        ({512: (0, 20_000), 2048: (0, 100_000)}, UNDECIDED),  # no error, but too few reads: the bound is 1.5e-4
        ({512: (0, 40_000), 2048: (10, 100_000)}, FAILS),
    ],
)
def test_error_per_read(reads, outcome):
    verdict = error_per_read("flip_flop iid", "tra", reads)
    assert verdict.outcome == outcome and "wrong at 512, a share of at most" in verdict.numbers


def test_an_error_that_is_not_cut_is_called_none():
    verdict = error_cut_by_sixty_percent("t", "tra", {100: 0.5, 200: 0.9}, {"rope": {100: 0.9, 200: 0.5}}, 50)
    assert verdict.outcome == FAILS and verdict.numbers == "none at 100 (rope), 80 % at 200 (rope)"
    for digits in (0.9990234, 0.99902344, 0.9990235):  # 511.5 of 512, as records and as runs have it
        verdict = error_cut_by_sixty_percent("t", "tra", {100: digits}, {"rope": {100: 0.99902344}}, 50)
        assert verdict.numbers == "none at 100 (rope)"
