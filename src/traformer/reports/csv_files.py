"""Numbers as CSV: all measurements of a report, and those of one figure."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

from traformer.reports.collect import Run
from traformer.reports.figures import Figure

COLUMNS = (
    "task", "attention", "seed", "train_length", "split", "length", "metric", "value", "low", "high", "examples",
    "chance", "study", "step", "note",
)  # fmt: skip


def measurements_csv(runs: Sequence[Run]) -> str:
    """Every measured number, one per line; `at` holds further coordinates as name=value."""
    rows: list[list[object]] = [["run", "lr", *COLUMNS, "at"]]
    for run in runs:
        for one in run.measurements:
            at = " ".join(f"{name}={value}" for name, value in one.at.items())
            rows.append([run.name, run.config.lr, *(getattr(one, name) for name in COLUMNS), at])
    return _text(rows)


def figure_csv(figure: Figure) -> str:
    """The points of a figure."""
    rows: list[list[object]] = [["method", figure.metric.along, figure.metric.name, "low", "high", "seeds", "chance"]]
    for series in figure.series:
        for point in series.points:
            rows.append([series.label, point.label, point.value, point.low, point.high, point.seeds, point.chance])
    return _text(rows)


def _text(rows: Iterable[Iterable[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in rows:
        writer.writerow([_safe(value) for value in row])
    return text.getvalue()


def _safe(value: object) -> object:
    """A name that starts like a formula would be run by a spreadsheet; an apostrophe keeps it text."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value
