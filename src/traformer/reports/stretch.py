"""What `tra stretch` found: a table for the terminal and for Markdown, a plot, and the measurements as a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.table import Table

from traformer.evaluation.table import cell_text, factor_text
from traformer.methods import label_of
from traformer.reports.collect import display_split, display_task, measured_runs
from traformer.reports.figures import figures
from traformer.reports.markdown import code_block, quote
from traformer.reports.page import page_styles
from traformer.reports.png import save_png
from traformer.reports.svg import grid_svg, standalone
from traformer.runs.measurements import Measurement, write_rows
from traformer.runs.metrics import METRICS, metric_named
from traformer.storage import write_atomically
from traformer.terminal import new_table

Measured = Mapping[str, Sequence[Measurement]]  # run -> measurements
_DRAWN = ("exact_match", "error_per_read", "keys_read", "microseconds_per_token")
_IN_TABLE = ("keys_read", "keys_read_most", "microseconds_per_token", "cpu_microseconds_per_token")


def labels(measured: Measured) -> dict[str, str]:
    """Run -> the attention's name, and the run's where two have the same."""
    attentions = {run: found[0].attention for run, found in measured.items()}
    shown = {}
    for run, attention in attentions.items():
        alone = list(attentions.values()).count(attention) == 1
        shown[run] = label_of(attention) if alone else f"{label_of(attention)} ({Path(run).name})"
    return shown


def columns(measured: Measured) -> list[str]:
    """The metrics that have a column: the task's own, then keys and time."""
    there = {one.metric for found in measured.values() for one in found}
    own = [name for name, metric in METRICS.items() if metric.section == "accuracy" and name in there]
    return own + [name for name in _IN_TABLE if name in there]


def header(measured: Measured) -> list[str]:
    names = [metric_named(name) for name in columns(measured)]
    return ["run", "split", "length", "x trained", *(metric.label for metric in names), "chance"]


def lines(measured: Measured) -> list[list[str]]:
    """A line per split, length and run."""
    names, metrics = labels(measured), columns(measured)
    cells: dict[tuple[str, int, str], dict[str, Measurement]] = {}
    for run, found in measured.items():
        for one in found:
            cells.setdefault((one.split, one.size, run), {})[one.metric] = one
    places = list(measured)
    ordered = sorted(cells.items(), key=lambda item: (item[0][0], item[0][1], places.index(item[0][2])))
    table = []
    for (split, size, run), by_metric in ordered:
        first = next(iter(by_metric.values()))
        chance = next((one.chance for one in by_metric.values() if one.chance is not None), None)
        table.append(
            [names[run], display_split(split) or "test", f"{size:,}", factor_text(size / first.train_length)]
            + [cell_text(by_metric.get(name)) for name in metrics]
            + [METRICS["exact_match"].text(chance)]
        )
    return table


def title(measured: Measured) -> str:
    first = next(iter(measured.values()))[0]
    return f"{display_task(first.task)}, trained to {first.train_length:,}: how far it stretches"


def stretch_table(measured: Measured) -> Table:
    """For the terminal."""
    table = new_table(title(measured))
    for place, name in enumerate(header(measured)):
        table.add_column(name, justify="left" if place < 2 else "right")
    for cells in lines(measured):
        table.add_row(*cells)
    return table


def stretch_markdown(measured: Measured, command: str, versions: Mapping[str, str]) -> str:
    """The table with what it takes to make it again."""
    head = header(measured)
    first = next(iter(measured.values()))[0]
    chunk, threads = first.protocol.get("chunk", 0), first.protocol.get("threads", "?")
    text = [f"# {quote(title(measured))}", "", "![](stretch.png)", "", "| " + " | ".join(head) + " |"]
    text.append("|" + "---|" * 2 + "---:|" * (len(head) - 2))
    text += ["| " + " | ".join(map(quote, cells)) + " |" for cells in lines(measured)]
    known = ", ".join(f"{name} {number}" for name, number in versions.items())
    text += [
        "",
        f"Keys read: by a query of the last chunk (up to {chunk:,} tokens), mean over heads and layers. Time: over all"
        f" tokens of a row (wall clock; CPU: of all threads), {threads} thread(s), batch 1 from {chunk:,} tokens on.",
        "",
        *code_block([command]),
        f"{quote(known)}.",
        "",
    ]
    return "\n".join(text)


def write_stretch(measured: Measured, folder: Path, command: str, versions: Mapping[str, str]) -> list[Path]:
    """stretch.json, stretch.md, stretch.png and stretch.svg."""
    rows = [{"run": run, **one.to_row()} for run, found in measured.items() for one in found]
    write_rows(folder / "stretch.json", rows)
    write_atomically(folder / "stretch.md", stretch_markdown(measured, command, versions))
    runs = measured_runs({run: list(found) for run, found in measured.items()})
    drawn = [one for one in figures(runs) if one.section == "stretch" and one.metric.name in _DRAWN]
    svg = grid_svg(drawn, page_styles(drawn), title(measured))
    write_atomically(folder / "stretch.svg", standalone(svg))
    save_png(svg, folder / "stretch.png")
    return [folder / f"stretch.{suffix}" for suffix in ("json", "md", "png", "svg")]
