"""Methods side by side on the terminal: one table a task."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from traformer.reports.collect import Panel, Point, Run, display_split, display_task, panels


def comparison_table(runs: Sequence[Run]) -> list[Table]:
    tables: dict[tuple[str, int], Table] = {}
    for panel in panels(runs):
        key = (panel.task, panel.train_length)
        labels = series_names([other for other in panels(runs) if (other.task, other.train_length) == key])
        if key not in tables:
            title = (
                f"{display_task(panel.task)}, trained to {panel.train_length}: "
                "exact match (95 % interval, or worst to best seed)"
            )
            tables[key] = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
            for name in ("split", "length", "x trained", *labels):
                tables[key].add_column(name, justify="left" if name == "split" else "right")
        for length, by_label in by_length(panel).items():
            point = next(iter(by_label.values()))
            cells = [point_text(by_label.get(label)) for label in labels]
            factor = f"{point.size / panel.train_length:.3g}"
            tables[key].add_row(display_split(panel.split) or "test", str(length), factor, *cells)
    return list(tables.values())


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
