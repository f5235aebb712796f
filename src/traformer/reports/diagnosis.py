"""The diagnosis as a table for the terminal and one plot for each failure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

Row = dict[str, Any]
_MARKERS = "osD^vP*X<>"
_LINES = ("-", "--", "-.", ":")


def diagnosis_table(summary: Sequence[Row]) -> Table:
    """A line for each run, step and length; the step stands there if a run has several."""
    several = several_steps(summary)
    table = Table(box=box.SIMPLE_HEAD)
    names = (
        "run",
        "attention",
        "length",
        "x trained",
        "reading head",
        "on source",
        "residue",
        "lifted pairs",
        "by (nats)",
    )
    forming = ("step", "marking head", "marks", "keeps", "decay")
    for name in (*names, *(forming if several else ())):
        table.add_column(name, justify="left" if name in ("run", "attention") else "right")
    for row in summary:
        factor = row["length"] / row["train_length"]
        cells = [
            Path(row["run"]).name,
            row["attention"],
            str(row["length"]),
            f"{factor:g}" if factor == int(factor) else f"{factor:.2f}",
            row["reading_head"],
            f"{row['source']:.3f}",
            f"{row['residue']:.3f}",
            f"{100 * row['lifted']:.2f} %",
            f"{row['log_ratio']:.2f}",
        ]
        if several:
            decay = "" if row["decay"] is None else f"{row['decay']:.3f}"
            cells += [str(row["step"]), row["marking_head"], f"{row['marks']:.3f}", f"{row['positive']:.3f}", decay]
        table.add_row(*cells)
    return table


def several_steps(summary: Sequence[Row]) -> bool:
    """Whether a run was looked at in more than one checkpoint."""
    return len({(row["run"], row["step"]) for row in summary}) > len({row["run"] for row in summary})


def plot_diagnosis(rows: Sequence[Row], summary: Sequence[Row], folder: Path) -> list[Path]:
    """residue.png and upweighting.png: a line for each attention, the mean of its runs (thin lines: each run).

    Both are of each run's newest step; of several steps formation.png shows the way there.
    """
    formation = [plot_formation(summary, folder)] if several_steps(summary) else []
    newest = {run: max(row["step"] for row in summary if row["run"] == run) for run in {row["run"] for row in summary}}
    rows = [row for row in rows if row["step"] == newest[row["run"]]]
    summary = [row for row in summary if row["step"] == newest[row["run"]]]
    residue = [(row["attention"], row["run"], row["length"] / row["train_length"], row["residue"]) for row in summary]
    longest = {row["run"]: max(r["length"] for r in rows if r["run"] == row["run"]) for row in rows}
    lifted = [
        (row["attention"], row["run"], row["from"] / row["train_tokens"], 100 * row["lifted"])
        for row in rows
        if row["kind"] == "distance" and row["length"] == longest[row["run"]]
    ]
    folder.mkdir(parents=True, exist_ok=True)
    first = _plot(
        residue, folder / "residue.png", "Residue: weight of the reading head on irrelevant keys",
        "length / training length", "weight", (1.0, "trained"),
    )  # fmt: skip
    second = _plot(
        lifted, folder / "upweighting.png", "Up-weighting: position lifts a negative key above a positive one",
        "distance of the lifted key / longest training sequence", "% of pairs", (1.0, "trained"),
    )  # fmt: skip
    return [first, second, *formation]


def plot_formation(summary: Sequence[Row], folder: Path) -> Path:
    """formation.png: what the reading and the marking head of each run do, step by step, at the shortest length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels = {  # a row of panels for each of the two heads
        "source": "reading head: weight on the source",
        "positive": "reading head: share of keys kept (score above 0)",
        "decay": "reading head: what a kept key between leaves of a weight",
        "marks": "marking head: the source's weight on the key before it",
        "marking_positive": "marking head: share of keys kept",
        "marking_decay": "marking head: what a kept key between leaves",
    }
    shortest = min(row["length"] for row in summary)
    summary = [row for row in summary if row["length"] == shortest]
    attentions = _in_order({row["attention"] for row in summary})
    colours = plt.get_cmap("tab10" if len(attentions) <= 10 else "tab20")
    figure, grid = plt.subplots(2, 3, figsize=(15, 7.5), dpi=100, sharex=True)
    for axes, (name, title) in zip(grid.flat, panels.items(), strict=True):
        for number, attention in enumerate(attentions):
            runs = sorted({row["run"] for row in summary if row["attention"] == attention})
            for index, run in enumerate(runs):
                line = sorted(
                    (row["step"], row[name]) for row in summary if row["run"] == run and row[name] is not None
                )
                if line:
                    style = _LINES[index % len(_LINES)]
                    label = f"{attention}, seed {next(row['seed'] for row in summary if row['run'] == run)}"
                    axes.plot(
                        *zip(*line, strict=True), color=colours(number), linestyle=style, linewidth=1.4, label=label
                    )
        axes.set_title(title, fontsize=10)
        axes.set_ylim(-0.02, 1.02)
        axes.grid(alpha=0.3)
    for axes in grid[1]:
        axes.set_xlabel("step")
    grid[0, 1].legend(fontsize=8, ncols=2)
    figure.tight_layout()
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "formation.png")
    plt.close(figure)
    return folder / "formation.png"


def _in_order(attentions: set[str]) -> list[str]:
    """TRA and its kin first."""
    return sorted(attentions, key=lambda name: (not name.startswith("tra"), name))


def _plot(
    points: list[tuple[str, str, float, float]],
    path: Path,
    title: str,
    x_label: str,
    y_label: str,
    edge: tuple[float, str],
) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 4.6), dpi=130)
    attentions = _in_order({point[0] for point in points})
    colours = plt.get_cmap("tab10" if len(attentions) <= 10 else "tab20")
    for number, attention in enumerate(attentions):
        colour, mine = colours(number), [point for point in points if point[0] == attention]
        runs = sorted({point[1] for point in mine})
        if len(runs) > 1:
            for run in runs:
                line = sorted((x, y) for _, r, x, y in mine if r == run)
                axes.plot(*zip(*line, strict=True), color=colour, linewidth=0.6, alpha=0.5)
        places = sorted({point[2] for point in mine})
        means = [sum(ys) / len(ys) for ys in ([y for _, _, x, y in mine if x == place] for place in places)]
        axes.plot(places, means, color=colour, marker=_MARKERS[number % len(_MARKERS)], label=attention, linewidth=1.8)
    axes.axvline(edge[0], color="0.4", linestyle=":", linewidth=1.2)
    axes.set_xscale("log", base=2)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
    return path
