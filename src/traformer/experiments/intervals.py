"""95 % intervals of means over a few seeds. Loads without torch.

Resampling five values and taking the middle 95 % of the means covers the true mean in some 84 % of cases: the draws are
as narrow as a normal distribution with the sample's own variance, divided by n. Student's t allows for both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

NORMAL = 1.959964  # the normal distribution's own quantile


@cache
def t_quantile(freedom: int) -> float:
    """What the size of Student's t exceeds in 5 % of cases, for a whole number of degrees of freedom."""
    low, high = 0.0, 20.0
    while high - low > 1e-10:
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < 0.95 else (low, middle)
    return high


def _within(t: float, freedom: int) -> float:
    """P(|T| < t), by the closed form for whole degrees of freedom."""
    angle = math.atan(t / math.sqrt(freedom))
    odd = freedom % 2
    term, total = (math.cos(angle), 0.0) if odd else (1.0, 0.0)
    for n in range(2 + odd, freedom + 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (n - 1) / n
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total


def widening(seeds: int) -> float:
    """By how much the spread of resampled means of so many values is too narrow; one seed says nothing about others."""
    return math.sqrt(seeds / (seeds - 1)) * t_quantile(seeds - 1) / NORMAL if seeds > 1 else 1.0


def widened(draws: NDArray[np.float64], seeds: int) -> NDArray[np.float64]:
    """Resampled means over so many seeds, spread about their mean as Student's t has it."""
    middle = draws.mean()
    return middle + widening(seeds) * (draws - middle)


def difference_of_means(first: Sequence[float], second: Sequence[float], paired: bool) -> tuple[float, float]:
    """Interval of the first mean less the second; paired: the same seeds in the same order on both sides.

    Unpaired it is Welch's, with the degrees of freedom of the smaller side, which is on the safe side.
    """
    a, b = np.array(first), np.array(second)
    if min(len(a), len(b)) < 2:
        raise ValueError("an interval over seeds needs at least two of them")
    sides = [a - b] if paired else [a, b]
    error = math.sqrt(sum(float(side.var(ddof=1)) / len(side) for side in sides))
    reach = t_quantile(min(map(len, sides)) - 1) * error
    mean = float(a.mean() - b.mean())
    return mean - reach, mean + reach
