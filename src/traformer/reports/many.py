"""Tables of many methods: a method is a row, a length a column, the best first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from traformer.methods import METHODS
from traformer.reports.collect import Panel, Point, Series, display_split
from traformer.reports.table import by_length, point_text, series_names

MANY = 8  # methods, above which columns would not fit a page, nor lines a plot
ALWAYS_DRAWN = ("tra_plus",)


def is_many(members: Sequence[Panel]) -> bool:
    return len(series_names(members)) > MANY


def drawn(panel: Panel) -> Panel:
    """The panel that is plotted: of many methods those that are no variant of another."""
    if not is_many([panel]):
        return panel
    named = {name for name, method in METHODS.items() if method.is_configuration} - set(ALWAYS_DRAWN)
    shown = [one for one in panel.series if one.attention not in named]
    return Panel(panel.task, panel.split, panel.train_length, shown)


def header(panel: Panel) -> list[str]:
    """method, number of seeds, then each length with its factor."""
    factors = []
    for length, found in by_length(panel).items():
        size = next(iter(found.values())).size
        factors.append(f"{length} ({size / panel.train_length:.3g}x)")
    return ["method", "seeds", *factors]


def seeds(series: Series) -> str:
    """How many, at the length that fewest were measured at."""
    return str(min(point.seeds for point in series.points))


def ranked(panel: Panel) -> list[tuple[Series, list[Point | None]]]:
    """Methods with their points, the one with the highest mean beyond the trained length first."""
    lengths = list(by_length(panel))

    def score(series: Series) -> tuple[float, float]:
        beyond = [point.value for point in series.points if point.size > panel.train_length]
        inside = [point.value for point in series.points if point.size <= panel.train_length]
        return sum(beyond), sum(inside)

    rows = []
    for series in sorted(panel.series, key=score, reverse=True):
        points = {point.length: point for point in series.points}
        rows.append((series, [points.get(length) for length in lengths]))
    return rows


def html_many(panel: Panel) -> str:
    """One split's table."""
    head = "".join(f"<th>{escape(text)}</th>" for text in header(panel))
    rows = []
    for series, points in ranked(panel):
        cells = "".join(share_cell(point) for point in points)
        rows.append(f"<tr><td>{escape(series.label)}</td><td>{seeds(series)}</td>{cells}</tr>")
    caption = f"<caption>{escape(display_split(panel.split) or 'test')}</caption>"
    table = f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f'<div class="scroll">{table}</div>'


def share_cell(point: Point | None) -> str:
    if point is None:
        return "<td></td>"
    return (
        f'<td class="share" style="--share:{100 * point.value:.1f}%"><b>{100 * point.value:.1f} %</b>'
        f" <small>{100 * point.low:.1f}–{100 * point.high:.1f}</small></td>"
    )


def markdown_many(panel: Panel, quote: Callable[[str], str]) -> list[str]:
    """The same in Markdown; `quote` escapes a label."""
    lines = ["", f"### {quote(display_split(panel.split) or 'test')}", ""]
    lines.append("| " + " | ".join(header(panel)) + " |")
    lines.append("|---" * len(header(panel)) + "|")
    for series, points in ranked(panel):
        cells = [quote(series.label), seeds(series), *map(point_text, points)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines
