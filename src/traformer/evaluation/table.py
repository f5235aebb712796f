"""Results as a table on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

METRICS = {"exact_match": "exact match", "token_accuracy": "token accuracy", "error_per_read": "error per read",
           "perplexity": "perplexity", "word_perplexity": "per word", "bits_per_byte": "bits per byte"}  # fmt: skip


def results_table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """One line for each split and length, one column for each metric, with its 95 % interval."""
    metrics = [metric for metric in METRICS if any(row["metric"] == metric for row in rows)]
    extras = [name for name in ("chance", "seen_in_training") if any(row.get(name) for row in rows)]
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for name in ("split", "length", "x trained"):
        table.add_column(name, justify="left" if name == "split" else "right")
    if any("protocol" in row for row in rows):
        table.add_column("stride", justify="right")
    for metric in metrics:
        table.add_column(f"{METRICS[metric]} (95 %)", justify="right")
    for name in extras:
        table.add_column(name.replace("_", " "), justify="right")
    table.add_column("examples", justify="right")
    cells: dict[tuple[str, Any], dict[str, dict[str, Any]]] = {}
    for row in rows:
        cells.setdefault((row["split"], row["length"]), {})[row["metric"]] = row
    for (split, length), found in cells.items():
        first = next(iter(found.values()))
        factor = size(first) / first["train_length"]
        values = [share(found.get(metric)) for metric in metrics]
        if "protocol" in first:
            values.insert(0, f"{first['protocol']['stride']:,}")
        more = [percent(found["exact_match"].get(name)) for name in extras]
        table.add_row(split, str(length), f"{factor:g}" if factor == int(factor) else f"{factor:.2f}", *values, *more,
                      f"{first['examples']:,}")  # fmt: skip
    return table


def size(row: dict[str, Any]) -> int:
    """The largest length of a row, as a number."""
    return int(str(row["length"]).rpartition("-")[2])


def share(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    if "protocol" in row:
        return f"{row['value']:.4g} ({row['low']:.4g}–{row['high']:.4g})"
    if row["metric"] == "error_per_read":
        return f"{row['value']:.2e} (< {row['high']:.1e})"
    return f"{percent(row['value'])} ({100 * row['low']:.1f}–{100 * row['high']:.1f})"


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"
