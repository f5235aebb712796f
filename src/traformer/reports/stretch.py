"""What `tra stretch` found: a table for the terminal and for Markdown, and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from traformer.evaluation.table import size
from traformer.methods import label_of
from traformer.reports.collect import display_split, display_task

Row = dict[str, Any]
# Okabe and Ito's colours; markers and dashes tell the runs apart without them.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b0578d", "#7a6a00", "#555555")
MARKERS = ("o", "s", "^", "D", "x")
DASHES = ("-", "--", ":", "-.", (0, (4, 1, 1, 1, 1, 1)))


def labels(rows: Sequence[Row]) -> dict[str, str]:
    """Run -> the attention's name, and the run's where two have the same."""
    attentions = {row["run"]: row["attention"] for row in rows}
    shown = {}
    for run, attention in attentions.items():
        alone = list(attentions.values()).count(attention) == 1
        shown[run] = label_of(attention) if alone else f"{label_of(attention)} ({Path(run).name})"
    return shown


def header(rows: Sequence[Row]) -> list[str]:
    accuracy = "read errors" if rows[0]["task"] == "flip_flop" else "needle accuracy"
    bound = "error per read (95 % bound)" if rows[0]["task"] == "flip_flop" else "95 % interval"
    return ["run", "split", "length", "x trained", accuracy, bound, "keys read, mean (most)", "µs per token", "CPU µs"]


def cells(row: Row, label: str) -> list[str]:
    factor = size(row) / row["train_length"]
    times = f"{factor:,.0f}" if factor >= 10 else f"{factor:.3g}"
    start = [label, display_split(row["split"]) or "test", f"{size(row):,}", times]
    if row["status"] != "measured":
        return [*start, row["status"], row["reason"], "", *_times(row)]
    if row["task"] == "flip_flop":
        accuracy = f"{row['errors']:,} of {row['answers']:,}"
        bound = f"{row['error_per_answer']:.1e} (< {row['error_upper_bound']:.1e})"
    else:
        chance = f", chance {100 * row['chance']:.1f} %" if "chance" in row else ""
        accuracy = f"{100 * row['exact_match']:.1f} % of {row['examples']}"
        bound = f"{100 * row['exact_low']:.1f}–{100 * row['exact_high']:.1f} %{chance}"
    return [*start, accuracy, bound, _keys(row), *_times(row)]


def _keys(row: Row) -> str:
    if row["keys_read_mean"] is None:
        return ""
    return f"{row['keys_read_mean']:,.0f} ({row['keys_read_most']:,})"


def _times(row: Row) -> list[str]:
    names = ("microseconds_per_token", "cpu_microseconds_per_token")
    return [f"{row[name]:,.1f}" if name in row else "" for name in names]


def title(rows: Sequence[Row]) -> str:
    return f"{display_task(rows[0]['task'])}, trained to {rows[0]['train_length']:,}: how far it stretches"


def stretch_table(rows: Sequence[Row]) -> Table:
    """For the terminal."""
    names = labels(rows)
    table = Table(title=title(rows), box=box.SIMPLE_HEAD, title_justify="left")
    for place, name in enumerate(header(rows)):
        table.add_column(name, justify="left" if place < 2 else "right")
    for row in rows:
        table.add_row(*cells(row, names[row["run"]]))
    return table


def stretch_markdown(rows: Sequence[Row], command: str, versions: dict[str, str]) -> str:
    """The table with what it takes to make it again."""
    names = labels(rows)
    head = header(rows)
    lines = [f"# {title(rows)}", "", "![](stretch.png)", "", "| " + " | ".join(head) + " |"]
    lines.append("|" + "---|" * 2 + "---:|" * (len(head) - 2))
    lines += ["| " + " | ".join(cells(row, names[row["run"]])) + " |" for row in rows]
    known = ", ".join(f"{name} {number}" for name, number in versions.items())
    lines += [
        "",
        f"Keys read: by a query of the last chunk (up to {rows[0]['chunk']:,} tokens), mean over heads and layers. "
        f"Time: over all tokens of a row (wall clock; CPU: of all threads), {rows[0]['threads']} thread(s), "
        f"batch 1 from {rows[0]['chunk']:,} tokens on.",
        "",
        f"    {command}",
        "",
        f"{known}.",
        "",
    ]
    return "\n".join(lines)


def plot_stretch(rows: Sequence[Row], folder: Path) -> Path:
    """Errors, keys read and time against length, as stretch.png and stretch.svg."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter, NullFormatter

    names = labels(rows)
    styles = {run: place for place, run in enumerate(names)}
    splits = list(dict.fromkeys(row["split"] for row in rows))
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.2), layout="constrained")
    accuracy_axis, keys_axis, time_axis = axes
    is_flip_flop = rows[0]["task"] == "flip_flop"
    for run, name in names.items():
        place = styles[run]
        colour, marker = COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]
        for number, split in enumerate(splits):
            mine = [row for row in rows if row["run"] == run and row["split"] == split]
            done = [row for row in mine if row["status"] == "measured"]
            label = name if len(splits) == 1 else f"{name} {display_split(split) or 'test'}"
            style = {
                "color": colour, "marker": marker, "linestyle": DASHES[number % len(DASHES)], "label": label,
                "markersize": 5, "linewidth": 1.6, "markerfacecolor": colour if number == 0 else "white",
            }  # fmt: skip
            if is_flip_flop:
                _errors(accuracy_axis, done, style)
            elif done:
                accuracy_axis.plot([r["size"] for r in done], [100 * r["exact_match"] for r in done], **style)
            read = [row for row in done if row["keys_read_mean"]]
            if read:
                keys_axis.plot([r["size"] for r in read], [r["keys_read_mean"] for r in read], **style)
            timed = [row for row in mine if "microseconds_per_token" in row]
            if timed:
                time_axis.plot([r["size"] for r in timed], [r["microseconds_per_token"] for r in timed], **style)
            stopped = [row for row in timed if row["status"] == "out of time"]
            for row in stopped:
                time_axis.annotate(
                    "out of time", (row["size"], row["microseconds_per_token"]), fontsize=8, color=colour,
                    textcoords="offset points", xytext=(4, 4),
                )  # fmt: skip
    trained = rows[0]["train_length"]
    for axis, heading in zip(axes, _headings(is_flip_flop), strict=True):
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_length(int(value))))
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.set_xlabel("length in tokens" if is_flip_flop else "length in symbols")
        axis.set_title(heading, fontsize=11, loc="left")
        axis.grid(alpha=0.3)
        axis.axvline(trained, color="#888888", linewidth=1)
    for axis in (keys_axis, time_axis):
        axis.set_yscale("log")
    if is_flip_flop:
        accuracy_axis.set_yscale("log")
    else:
        accuracy_axis.set_ylim(-3, 103)
    accuracy_axis.legend(fontsize=8)
    figure.suptitle(title(rows), fontsize=12)
    for suffix in ("png", "svg"):
        figure.savefig(folder / f"stretch.{suffix}", dpi=130)
    plt.close(figure)
    return folder / "stretch.png"


def _headings(is_flip_flop: bool) -> tuple[str, str, str]:
    first = "Errors per read (arrow: none seen, 95 % bound)" if is_flip_flop else "Needle accuracy in %"
    return first, "Keys read by a query (mean)", "Time per token in µs"


def _errors(axis: Any, rows: Sequence[Row], style: dict[str, Any]) -> None:
    """Errors per read; where none was seen, an arrow down from the bound."""
    if not rows:
        return
    heights = [row["error_per_answer"] or row["error_upper_bound"] for row in rows]
    axis.plot([row["size"] for row in rows], heights, **style)
    for row, height in zip(rows, heights, strict=True):
        if not row["errors"]:
            axis.annotate(
                "", (row["size"], height / 2.2), (row["size"], height),
                arrowprops={"arrowstyle": "->", "color": style["color"]},
            )  # fmt: skip


def short_length(length: int) -> str:
    """1024 -> 1k, 1048576 -> 1m."""
    for unit, letter in ((1 << 20, "m"), (1 << 10, "k")):
        if length >= unit and length % unit == 0:
            return f"{length // unit}{letter}"
    return str(length)
