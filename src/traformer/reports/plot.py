"""Accuracy against length as inline SVG: themed by the page's style sheet, readable without colour, nothing to load."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from html import escape

from traformer.reports.collect import Panel, Point, Series, display_split, display_task

WIDTH, HEIGHT = 420, 300
LEFT, RIGHT, TOP, BOTTOM = 46, 62, 48, 46
LABEL_GAP, LETTER = 13, 8.2  # from a line's end to its label; width of a letter there
MARGIN = 8  # of the plotting area beyond the longest length
# Markers and dashes tell the series apart where colours do not. Coordinates are around the point.
MARKERS = ("circle", "square", "triangle", "diamond", "cross")
DASHES = ("", "7 4", "2 4", "10 4 2 4", "4 3 1 3")


def accuracy_plot(panel: Panel, styles: dict[str, int], unit: str) -> str:
    """One panel. `styles` numbers the series over the whole page, so that a method always looks the same."""
    sizes = sorted({point.size for series in panel.series for point in series.points})
    low, high = min([*sizes, panel.train_length]), max([*sizes, panel.train_length])
    x = _log_axis(low, high)
    y = lambda value: TOP + (1 - value) * (HEIGHT - TOP - BOTTOM)  # noqa: E731
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    trained = x(panel.train_length)
    name = " ".join(filter(None, [display_task(panel.task), display_split(panel.split)]))
    described = escape(_description(panel, name))
    edge = right + MARGIN
    parts = [
        f'<svg class="plot" viewBox="0 0 {plot_width(panel)} {HEIGHT}" role="img" aria-label="{described}">',
        f'<text class="plot-title" x="{LEFT}" y="20">{escape(name)}</text>',
        f'<rect class="beyond" x="{trained:.1f}" y="{TOP}" width="{edge - trained:.1f}" height="{bottom - TOP}"/>',
    ]
    for share in (0, 0.25, 0.5, 0.75, 1):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{edge}" y1="{y(share):.1f}" y2="{y(share):.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 7}" y="{y(share) + 4:.1f}" text-anchor="end">{share:.0%}</text>')
    for size in _ticks(sizes, x):
        parts.append(f'<line class="axis" x1="{x(size):.1f}" x2="{x(size):.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
        parts.append(f'<text class="tick" x="{x(size):.1f}" y="{bottom + 17}" text-anchor="middle">{size:,}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{edge}" y1="{bottom}" y2="{bottom}"/>')
    parts.append(
        f'<text class="axis-title" x="{(LEFT + right) / 2:.0f}" y="{HEIGHT - 8}" text-anchor="middle">'
        f"length in {escape(unit)}, log scale</text>"
    )
    parts.append(f'<line class="trained" x1="{trained:.1f}" x2="{trained:.1f}" y1="{TOP}" y2="{bottom}"/>')
    if right - trained > 90:
        parts.append(f'<text class="note" x="{trained + 5:.1f}" y="{TOP - 6}">never trained on →</text>')
    chance = [point for point in panel.series[0].points if point.chance is not None]
    if len(chance) > 1:
        points = " ".join(f"{x(point.size):.1f},{y(point.chance):.1f}" for point in chance)
        parts.append(f'<polyline class="chance" points="{points}"/>')
        place = f'x="{x(chance[0].size) + 8:.1f}" y="{y(chance[0].chance or 0) - 5:.1f}"'
        parts.append(f'<text class="note" {place}>chance</text>')
    label_places = _spread([y(series.points[-1].value) for series in panel.series], 15, TOP + 4, bottom)
    for series, label_y in zip(panel.series, label_places, strict=True):
        parts += _series(series, styles[series.label], x, y, label_y)
    parts.append("</svg>")
    return "\n".join(parts)


def _series(series: Series, style: int, x, y, label_y: float) -> list[str]:
    line = " ".join(f"{x(point.size):.1f},{y(point.value):.1f}" for point in series.points)
    parts = [f'<g class="series s{style % 6}">']
    for point in series.points:
        parts.append(
            f'<line class="interval" x1="{x(point.size):.1f}" x2="{x(point.size):.1f}"'
            f' y1="{y(point.low):.1f}" y2="{y(point.high):.1f}"/>'
        )
    dash = DASHES[style % len(DASHES)]
    parts.append(f'<polyline class="line" points="{line}"' + (f' stroke-dasharray="{dash}"' if dash else "") + "/>")
    for point in series.points:
        parts.append(
            f"<g>{marker(style, x(point.size), y(point.value))}<title>{escape(_point_text(series, point))}</title></g>"
        )
    last = series.points[-1]
    place = f'x="{x(last.size) + LABEL_GAP:.1f}" y="{label_y + 4:.1f}"'
    parts.append(f'<text class="label" {place}>{escape(_short(series.label))}</text></g>')
    return parts


def plot_width(panel: Panel) -> int:
    """Of the whole picture: wider where a label at a line's end needs the room."""
    longest = max(len(_short(series.label)) for series in panel.series)
    return WIDTH + max(0, round(longest * LETTER) + LABEL_GAP - RIGHT)


def _short(label: str) -> str:
    return label if len(label) <= 9 else label.split(" (")[0]


def marker(style: int, x: float, y: float, r: float = 4.2) -> str:
    kind = MARKERS[style % len(MARKERS)]
    if kind == "circle":
        return f'<circle class="marker" cx="{x:.1f}" cy="{y:.1f}" r="{r}"/>'
    if kind == "square":
        return f'<rect class="marker" x="{x - r:.1f}" y="{y - r:.1f}" width="{2 * r}" height="{2 * r}"/>'
    if kind == "triangle":
        corners = f"{x:.1f},{y - r - 1:.1f} {x - r - 1:.1f},{y + r:.1f} {x + r + 1:.1f},{y + r:.1f}"
    elif kind == "diamond":
        corners = (
            f"{x:.1f},{y - r - 1.5:.1f} {x + r + 1.5:.1f},{y:.1f} {x:.1f},{y + r + 1.5:.1f} {x - r - 1.5:.1f},{y:.1f}"
        )
    else:
        return (
            f'<path class="marker open" d="M{x - r:.1f} {y - r:.1f} l{2 * r} {2 * r} m0 {-2 * r} l{-2 * r} {2 * r}"/>'
        )
    return f'<polygon class="marker" points="{corners}"/>'


def legend(styles: dict[str, int]) -> str:
    """The series of the page, each with its line and marker."""
    items = []
    for label, style in styles.items():
        dash = DASHES[style % len(DASHES)]
        stroke = f' stroke-dasharray="{dash}"' if dash else ""
        items.append(
            f'<span class="legend-item"><svg class="series s{style % 6}" width="44" height="14" aria-hidden="true">'
            f'<line class="line" x1="2" x2="42" y1="7" y2="7"{stroke}/>{marker(style, 22, 7)}</svg>'
            f"{escape(label)}</span>"
        )
    return f'<p class="legend">{"".join(items)}</p>'


def _log_axis(low: int, high: int):
    """Length -> x. Shortest and longest keep a little distance from the edges."""
    left, right = LEFT + 26, WIDTH - RIGHT
    if low == high:
        return lambda size: (left + right) / 2
    return lambda size: left + (right - left) * math.log(size / low) / math.log(high / low)


def _ticks(sizes: Sequence[int], x) -> list[int]:
    """Every measured length that has room; the longest always has."""
    chosen: list[int] = []
    for size in reversed(sizes):
        if not chosen or x(chosen[-1]) - x(size) >= 30:
            chosen.append(size)
    return chosen[::-1]


def _spread(places: list[float], gap: float, top: float, bottom: float) -> list[float]:
    """The places moved apart so that labels do not overlap, in the same order."""
    order = sorted(range(len(places)), key=lambda index: places[index])
    moved = list(places)
    for before, after in itertools.pairwise(order):
        moved[after] = max(moved[after], moved[before] + gap)
    limit = bottom
    for index in reversed(order):
        moved[index] = max(top, min(moved[index], limit))
        limit = moved[index] - gap
    return moved


def _point_text(series: Series, point: Point) -> str:
    seeds = f"{point.seeds} seeds, worst to best" if point.seeds > 1 else "95 % interval"
    return (
        f"{series.label} at {point.length}: {100 * point.value:.1f} %"
        f" ({100 * point.low:.1f}–{100 * point.high:.1f}, {seeds}, {point.examples} sequences)"
    )


def _description(panel: Panel, name: str) -> str:
    ends = "; ".join(f"{s.label} {100 * s.points[-1].value:.0f} % at {s.points[-1].length}" for s in panel.series)
    return f"{name}: exact match against length, trained to {panel.train_length}. {ends}."
