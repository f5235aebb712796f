"""The diagnosis as a table for the terminal and one plot for each failure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

Row = dict[str, Any]
_MARKERS = "osD^vP*X<>"


def diagnosis_table(summary: Sequence[Row]) -> Table:
    """A line for each run and length."""
    table = Table(box=box.SIMPLE_HEAD)
    for name in (
        "run",
        "attention",
        "length",
        "x trained",
        "reading head",
        "on source",
        "residue",
        "lifted pairs",
        "by (nats)",
    ):
        table.add_column(name, justify="left" if name in ("run", "attention") else "right")
    for row in summary:
        factor = row["length"] / row["train_length"]
        table.add_row(
            Path(row["run"]).name,
            row["attention"],
            str(row["length"]),
            f"{factor:g}" if factor == int(factor) else f"{factor:.2f}",
            row["reading_head"],
            f"{row['source']:.3f}",
            f"{row['residue']:.3f}",
            f"{100 * row['lifted']:.2f} %",
            f"{row['log_ratio']:.2f}",
        )
    return table


def plot_diagnosis(rows: Sequence[Row], summary: Sequence[Row], folder: Path) -> list[Path]:
    """residue.png and upweighting.png: a line for each attention, the mean of its runs (thin lines: each run)."""
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
    return [first, second]


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
    attentions = sorted({point[0] for point in points}, key=lambda name: (not name.startswith("tra"), name))
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
