"""Axes of the SVG plots: from values to coordinates, and the numbers written beside them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from traformer.reports.figures import Figure

Place = Callable[[float], float]
TICK_GAP = 30  # between numbers beside the x axis, at least


@dataclass(frozen=True)
class Axis:
    """A value's coordinate, and the values that get a number."""

    at: Place
    ticks: list[float]


def x_axis(figure: Figure, left: float, right: float) -> Axis:
    """Lengths, places and distances on a log scale, steps on a linear one; ticks are at measured places.

    The farthest place always has a tick, then the trained length, then every place that has room.
    """
    xs = sorted({point.x for series in figure.series for point in series.points})
    ends = [*xs, figure.edge] if figure.edge else xs
    at = _log(min(ends), max(ends), left, right) if figure.log_x else _linear(0.0, max(ends), left, right)
    if not figure.log_x:
        return Axis(at, _round_numbers(0.0, max(ends), 4))
    chosen: list[float] = []
    for x in sorted(xs, key=lambda x: (x != xs[-1], x != figure.edge, -x)):
        if all(abs(at(other) - at(x)) >= TICK_GAP for other in chosen):
            chosen.append(x)
    return Axis(at, sorted(chosen))


def y_axis(figure: Figure, top: float, bottom: float) -> Axis:
    """0 to 1 for shares; otherwise what the values and their intervals span, on a log or a linear scale.

    What lies beyond is drawn at the edge: on a log axis the lower end of an interval may be 0.
    """
    axis = _fitted(figure, top, bottom)
    return Axis(lambda value: min(bottom, max(top, axis.at(value))), axis.ticks)


def _fitted(figure: Figure, top: float, bottom: float) -> Axis:
    if figure.metric.scale == "share":
        return Axis(_linear(0.0, 1.0, bottom, top), [0.0, 0.25, 0.5, 0.75, 1.0])
    points = [point for series in figure.series for point in series.drawn]
    heights = [figure.height(point) for point in points]
    bands = [end for point in points if point.seeds > 1 for end in (point.low, point.high) if end is not None]
    values = [*heights, *bands]
    if figure.metric.scale == "log" and all(value > 0 for value in heights):
        positive = [value for value in values if value > 0]
        low, high = _padded(math.log(min(positive)), math.log(max(positive)), 0.1)
        low, high = math.exp(low), math.exp(high)
        return Axis(_log(low, high, bottom, top), _log_numbers(low, high))
    low, high = _padded(min(values), max(values), 0.05)
    return Axis(_linear(low, high, bottom, top), _round_numbers(low, high, 5))


def _padded(low: float, high: float, least: float) -> tuple[float, float]:
    """A little more than the values span, and never nothing."""
    if high - low < least:
        middle = (low + high) / 2
        low, high = middle - least / 2, middle + least / 2
    pad = 0.06 * (high - low)
    return low - pad, high + pad


def _log(low: float, high: float, start: float, end: float) -> Place:
    if low == high:
        return lambda value: (start + end) / 2
    span = math.log(high / low)
    return lambda value: start + (end - start) * math.log(max(value, 1e-300) / low) / span


def _linear(low: float, high: float, start: float, end: float) -> Place:
    if low == high:
        return lambda value: (start + end) / 2
    return lambda value: start + (end - start) * (value - low) / (high - low)


def _log_numbers(low: float, high: float) -> list[float]:
    """Powers of ten where there are several, else round numbers between them, three to six in all."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
        numbers = [digit * 10.0**power for power in powers for digit in digits if low <= digit * 10.0**power <= high]
        if len(numbers) >= 3:
            return numbers[:: -(-len(numbers) // 6)]
    wanted = [low * (high / low) ** ((step + 0.5) / 5) for step in range(5)]
    return sorted({float(f"{value:.2g}") for value in wanted if low < float(f"{value:.2g}") < high})


def _round_numbers(low: float, high: float, count: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten within the range."""
    if high <= low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    return [number * step for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def spread(places: Sequence[float], gap: float, top: float, bottom: float) -> list[float]:
    """The places moved apart so that labels do not overlap, in the same order."""
    order = sorted(range(len(places)), key=lambda index: places[index])
    moved = [max(top, place) for place in places]
    for before, after in itertools.pairwise(order):
        moved[after] = max(moved[after], moved[before] + gap)
    limit = bottom
    for index in reversed(order):
        moved[index] = max(top, min(moved[index], limit))
        limit = moved[index] - gap
    return moved
