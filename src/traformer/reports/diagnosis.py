"""What `tra diagnose` found: a table for the terminal, plots of both failures, and of how heads form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.table import Table

from traformer.evaluation.heads import Head, HeadSummary, head_summaries
from traformer.evaluation.table import factor_text
from traformer.methods import label_of
from traformer.reports.collect import measured_runs
from traformer.reports.figures import Figure, Point, Series, figures
from traformer.reports.page import page_styles
from traformer.reports.png import save_png
from traformer.reports.svg import grid_svg
from traformer.runs.measurements import Measurement, write_rows
from traformer.runs.metrics import METRICS, Metric
from traformer.terminal import new_table

Measured = Mapping[str, Sequence[Measurement]]  # run -> measurements
_FILES = {
    "residue.png": ("source_weight", "residue"),
    "upweighting.png": ("lifted_pairs", "lifted_by_distance"),
}


def diagnosis_table(measured: Measured) -> Table:
    """A line per run, step and length; what shows how heads form is there if a run has several steps."""
    summaries = {run: head_summaries(found) for run, found in measured.items()}
    several = any(_several_steps(rows) for rows in summaries.values())
    table = new_table()
    names = ["run", "attention", "length", "x trained", "reading head"]
    names += ["on source", "residue", "lifted pairs", "by (nats)"]
    names += ["step", "marking head", "marks", "keeps", "decay"] if several else []
    for name in names:
        table.add_column(name, justify="left" if name in ("run", "attention") else "right")
    for run, rows in summaries.items():
        for row in rows:
            cells = [
                Path(run).name, row.attention, str(row.length), factor_text(row.length / row.train_length),
                _head(row.reading_head), f"{row.source_weight:.3f}", f"{row.residue:.3f}",
                METRICS["lifted_pairs"].text(row.lifted_pairs), f"{row.lift_in_nats:.2f}",
            ]  # fmt: skip
            if several:
                decay = "" if row.gate_decay is None else f"{row.gate_decay:.3f}"
                cells += [str(row.step), _head(row.marking_head), f"{row.marks:.3f}", f"{row.positive_keys:.3f}", decay]
            table.add_row(*cells)
    return table


def _head(head: Head) -> str:
    return f"{head[0]}.{head[1]}"


def _several_steps(rows: Sequence[HeadSummary]) -> bool:
    return len({row.step for row in rows}) > 1


def write_diagnosis(measured: Measured, folder: Path) -> list[Path]:
    """diagnosis.json, residue.png and upweighting.png; of several steps formation.png shows the way there."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"run": run, **one.to_row()} for run, found in measured.items() for one in found]
    write_rows(folder / "diagnosis.json", rows)
    drawn = figures(measured_runs({run: list(found) for run, found in measured.items()}))
    written = [folder / "diagnosis.json"]
    for name, metrics in _FILES.items():
        chosen = [one for one in drawn if one.metric.name in metrics]
        save_png(grid_svg(chosen, page_styles(chosen)), folder / name)
        written.append(folder / name)
    if any(_several_steps(head_summaries(found)) for found in measured.values()):
        written.append(plot_formation(measured, folder))
    return written


# A row of panels for each of the two heads: field of HeadSummary -> what it is.
_PANELS = {
    "source_weight": "reading head, weight on the source",
    "positive_keys": "reading head, share of keys kept (score above 0)",
    "gate_decay": "reading head, what a kept key between leaves",
    "marks": "marking head, weight on the key before the source",
    "marking_positive": "marking head, share of keys kept",
    "marking_decay": "marking head, what a kept key between leaves",
}


def plot_formation(measured: Measured, folder: Path) -> Path:
    """formation.png: what the reading and the marking head of each run do, step by step, at the shortest length."""
    summaries = {run: head_summaries(found) for run, found in measured.items()}
    drawn = [_formation(name, label, summaries) for name, label in _PANELS.items()]
    file = folder / "formation.png"
    save_png(grid_svg(drawn, page_styles(drawn)), file)
    return file


def _formation(name: str, label: str, summaries: Mapping[str, Sequence[HeadSummary]]) -> Figure:
    series = []
    for rows in summaries.values():
        shortest = min((row.length for row in rows), default=0)
        points = [
            Point(float(row.step), str(row.step), getattr(row, name), None, None, 1, 0)
            for row in rows
            if row.length == shortest and getattr(row, name) is not None
        ]
        if points:
            series.append(Series(f"{label_of(rows[0].attention)}, seed {rows[0].seed}", rows[0].attention, points))
    first = next(rows[0] for rows in summaries.values() if rows)
    metric = Metric(name, label, "", section="inside", format="share", scale="share", along="step")
    return Figure(metric, first.task, "", "inside", first.train_length, None, "step", series)
