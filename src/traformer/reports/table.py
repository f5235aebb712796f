"""What tables of results are made of: names, lengths, and a number with its interval."""

from __future__ import annotations

from collections.abc import Sequence

from traformer.reports.collect import Panel, Point


def series_names(all_panels: Sequence[Panel]) -> list[str]:
    return list(dict.fromkeys(series.label for panel in all_panels for series in panel.series))


def by_length(panel: Panel) -> dict[int | str, dict[str, Point]]:
    """Length -> series label -> point, shortest first."""
    found: dict[int | str, dict[str, Point]] = {}
    for point, label in sorted(
        ((point, series.label) for series in panel.series for point in series.points), key=lambda pair: pair[0].size
    ):
        found.setdefault(point.length, {})[label] = point
    return found


def point_text(point: Point | None) -> str:
    if point is None:
        return ""
    return f"{100 * point.value:.1f} % ({100 * point.low:.1f}–{100 * point.high:.1f})"
