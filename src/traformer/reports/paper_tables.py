"""Tables of `tra reproduce` as figures, a line per method against length, and many of them as one short table."""

from __future__ import annotations

from collections.abc import Sequence

from traformer.experiments.paper_results import Summary
from traformer.methods import label_of
from traformer.reports.collect import unit_of
from traformer.reports.figures import Figure, Point, Series, labels_of
from traformer.reports.svg import figure_svg
from traformer.runs.measurements import Measurement, largest_length
from traformer.runs.metrics import METRICS


def figure_of(summary: Summary) -> Figure:
    """Means over seeds, the worst and the best shaded; a range of lengths is drawn at its upper end."""
    series = [
        Series(label_of(method), method, [_point(label, by_length[label]) for label in sorted(by_length, key=_size)])
        for method, by_length in summary.rows.items()
    ]
    task = next(iter(next(iter(summary.rows.values())).values()))[0].task
    x_label = f"length in {unit_of(task)}, log scale"
    trained = summary.trained
    return Figure(METRICS[summary.metric], summary.part, summary.split, "length", trained, trained, x_label, series)


def drawn(summaries: Sequence[Summary]) -> dict[str, str]:
    """{name of a file without its suffix: SVG}, one for each summary that more than one length was measured for."""
    pictures = {}
    for summary in summaries:
        if len(summary.lengths) > 1:
            figure = figure_of(summary)
            styles = {label: number for number, label in enumerate(labels_of([figure]))}
            name = summary.part if summary.split in ("test", "validation") else f"{summary.part}-{summary.split}"
            pictures[name.replace("/", "-")] = figure_svg(figure, styles)
    return pictures


def overview(summaries: Sequence[Summary]) -> str:
    """A row for each summary, a column for each method: means at the shortest length, the next, the middle, the last.

    The lengths are those of the first summary; where another one has none of these, a dash stands.
    """
    methods = list(dict.fromkeys(method for summary in summaries for method in summary.rows))
    lengths = summaries[0].lengths
    chosen = [lengths[place] for place in sorted({0, min(1, len(lengths) - 1), len(lengths) // 2, len(lengths) - 1})]
    head = f"exact match in % at {', '.join(chosen)}"
    lines = ["| " + " | ".join([head, *(f"`{method}`" for method in methods), "chance"]) + " |"]
    lines.append("|---" * (len(methods) + 2) + "|")
    for summary in summaries:
        cells = []
        for method in methods:
            means = summary.means(method) if method in summary.rows else {}
            cells.append(_list([means.get(largest_length(label)) for label in chosen]) if means else "")
        name = summary.part if summary.split in ("test", "validation") else summary.split.rpartition("/")[2]
        chances = _list([summary.chance(label) for label in chosen])
        lines.append("| " + " | ".join([name.replace("_", " "), *cells, chances]) + " |")
    return "\n".join(lines) + "\n"


def _list(shares: Sequence[float | None]) -> str:
    return ", ".join("–" if share is None else f"{100 * share:.0f}" for share in shares)


def _size(label: str) -> int:
    return largest_length(label)


def _point(label: str, rows: Sequence[Measurement]) -> Point:
    values = [row.value or 0.0 for row in rows]
    mean = sum(values) / len(values)
    return Point(
        float(largest_length(label)), label, mean, min(values), max(values), len(rows), rows[0].examples, rows[0].chance
    )
