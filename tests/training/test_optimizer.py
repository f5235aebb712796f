from __future__ import annotations

import itertools

import pytest

from traformer.training.optimizer import learning_rate


def rates(steps, warmup, minimum=0.0):
    return [learning_rate(s, steps=steps, peak=2.0, warmup=warmup, minimum=minimum) for s in range(steps)]


def test_warm_up_is_linear_and_takes_five_per_cent():
    values = rates(200, 0.05)
    assert values[:10] == pytest.approx([0.2 * (k + 1) for k in range(10)])
    assert max(values) == values[9] == pytest.approx(2.0)


def test_cosine_falls_to_the_minimum():
    values = rates(1000, 0.05, minimum=0.1)
    falling = values[50:]
    assert all(a >= b for a, b in itertools.pairwise(falling))
    assert falling[len(falling) // 2] == pytest.approx(1.05, abs=0.01)
    assert falling[-1] == pytest.approx(0.1, abs=1e-4)


def test_no_warm_up_and_one_step():
    assert rates(4, 0.0)[0] == 2.0
    assert rates(1, 0.05) == [2.0]
    assert all(value >= 0 for value in rates(3, 1.0))
