"""The two figures at the top of an explore page: how weight and answers change as the input grows."""

from __future__ import annotations

from collections import Counter
from html import escape
from typing import TYPE_CHECKING

from traformer.reports.figures import Figure, Point, Series
from traformer.reports.svg import figure_svg
from traformer.runs.metrics import Metric

if TYPE_CHECKING:
    from traformer.evaluation.exploration import Exploration

_METRICS = {
    "weight": Metric(
        "deciding_weight", "weight on what decides the answer", "The most that any head has.", format="percent",
        scale="share", better="higher",
    ),
    "right": Metric(
        "answers_right", "answers predicted right", "Of the same answers.", format="percent", scale="share",
        better="higher",
    ),
}  # fmt: skip


def growth_section(exploration: Exploration) -> str:
    """HTML; empty where there is one length only, or where no key decides an answer."""
    if not any(len(run.growth) > 1 for run in exploration.runs):
        return ""
    figures = [_figure(exploration, name) for name in _METRICS]
    styles = {series.label: number for number, series in enumerate(figures[0].series)}
    plots = "".join(f"<figure>{figure_svg(figure, styles)}</figure>" for figure in figures)
    counts = {point.tokens: point.sequences for run in exploration.runs for point in run.growth}
    most = max(counts.values())
    fewer = ", ".join(f"{count} at {tokens:,} tokens" for tokens, count in sorted(counts.items()) if count < most)
    many = f"{most} sequences" + (f" ({fewer})" if fewer else "")
    how = (
        "Each length has the same examples: only tokens that the answer does not depend on are added, between the"
        " answer and what decides it."
        if exploration.is_grown
        else "Each length has examples of its own."
    )
    note = f"{how} Weight: the most that any head has on the keys that decide the answer. Means over {many}."
    shown = f'<div class="plots">{plots}</div><p class="sub">{escape(note)}</p>'
    return f'<section aria-label="As the input grows">{shown}</section>'


def _figure(exploration: Exploration, name: str) -> Figure:
    labels = Counter(run.label for run in exploration.runs)
    series = []
    for number, run in enumerate(exploration.runs):
        points = [
            Point(float(one.tokens), f"{one.tokens:,} tokens", getattr(one, name), None, None, 1, one.sequences)
            for one in run.growth
        ]
        label = run.label if labels[run.label] == 1 else f"{run.label} (model {number + 1})"
        if points:
            series.append(Series(label, "", points))
    trained = min((run.trained for run in exploration.runs if run.trained), default=0)
    edge = float(trained) if trained else None
    return Figure(_METRICS[name], "", "", "accuracy", trained, edge, "tokens, log scale", series)
