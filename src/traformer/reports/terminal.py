"""Methods side by side on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from traformer.reports.collect import Panel, Run, display_split, display_task, panels
from traformer.reports.many import header, is_many, ranked, seeds
from traformer.reports.perplexity import NAMES, text_cells, text_panels
from traformer.reports.table import by_length, point_text, series_names


def comparison_table(runs: Sequence[Run]) -> list[Table]:
    """One table a task, methods as columns; of many methods one a split, methods as rows."""
    tables: dict[tuple[str, ...], Table] = {}
    for panel in panels(runs):
        key: tuple[str, ...] = (panel.task, str(panel.train_length))
        members = [other for other in panels(runs) if (other.task, str(other.train_length)) == key]
        what = "exact match (95 % interval, or worst to best seed)"
        if is_many(members):
            title = f"{display_task(panel.task)} {display_split(panel.split)}, trained to {panel.train_length}: {what}"
            tables[(*key, panel.split)] = _many_table(panel, title)
            continue
        labels = series_names(members)
        if key not in tables:
            title = f"{display_task(panel.task)}, trained to {panel.train_length}: {what}"
            tables[key] = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
            for name in ("split", "length", "x trained", *labels):
                tables[key].add_column(name, justify="left" if name == "split" else "right")
        for length, by_label in by_length(panel).items():
            point = next(iter(by_label.values()))
            cells = [point_text(by_label.get(label)) for label in labels]
            factor = f"{point.size / panel.train_length:.3g}"
            tables[key].add_row(display_split(panel.split) or "test", str(length), factor, *cells)
    return [*tables.values(), *(_text_table(metric, panel) for metric, panel in text_panels(runs))]


def _text_table(metric: str, panel: Panel) -> Table:
    title = f"Text, {panel.split}, trained at window {panel.train_length}: {NAMES[metric]}, lower is better"
    labels = series_names([panel])
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for name in ("window", "x trained", *labels):
        table.add_column(name, justify="right")
    for cells in text_cells(panel, labels):
        table.add_row(*cells)
    return table


def _many_table(panel: Panel, title: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for name in header(panel):
        table.add_column(name, justify="left" if name == "method" else "right")
    for series, points in ranked(panel):
        table.add_row(series.label, seeds(series), *map(point_text, points))
    return table
