"""What `tra eval` measured, as a table for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from traformer.runs.measurements import Measurement
from traformer.runs.metrics import METRICS, metric_named
from traformer.terminal import new_table


def results_table(measurements: Sequence[Measurement], title: str) -> Table:
    """One line per split and length, one column per metric, with its 95 % interval."""
    shown = [one for one in measurements if metric_named(one.metric).along == "length"]
    names = [name for name in METRICS if any(one.metric == name for one in shown)]
    names += [name for name in dict.fromkeys(one.metric for one in shown) if name not in METRICS]
    lines: dict[tuple[str, int | str], dict[str, Measurement]] = {}
    for one in shown:
        lines.setdefault((one.split, one.length), {})[one.metric] = one
    with_stride = any("stride" in one.protocol for one in shown)
    with_chance = any(one.chance is not None for one in shown)
    with_overlap = any(one.seen_in_training for one in shown)

    table = new_table(escape(title))
    header = ["split", "length", "x trained", *(["stride"] if with_stride else [])]
    header += [f"{metric_named(name).label} (95 %)" for name in names]
    header += [*(["chance"] if with_chance else []), *(["seen in training"] if with_overlap else []), "examples"]
    for name in header:
        table.add_column(name, justify="left" if name == "split" else "right")
    for (split, length), found in lines.items():
        first = next(iter(found.values()))
        cells = [escape(split), str(length), factor_text(first.size / first.train_length)]
        if with_stride:
            cells.append(f"{first.protocol['stride']:,}")
        for name in names:
            cells.append(escape(cell_text(found.get(name))))
        if with_chance:
            cells.append(percent(first.chance))
        if with_overlap:
            cells.append(percent(first.seen_in_training))
        table.add_row(*cells, f"{first.examples:,}")
    return table


def cell_text(one: Measurement | None) -> str:
    """A number with its interval, or why there is none."""
    if one is None:
        return ""
    if one.value is None:
        return one.note
    return metric_named(one.metric).value_and_interval(one.value, one.low, one.high)


def factor_text(factor: float) -> str:
    """How many times the trained length, with three digits at most."""
    return f"{factor:,.0f}" if factor >= 100 or factor == int(factor) else f"{factor:.3g}"


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"
