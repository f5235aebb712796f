"""Perplexity against the window, for text runs: a plot with every method as a line, and a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from traformer.evaluation.perplexity import protocol_text
from traformer.reports.collect import Panel, Run, panels
from traformer.reports.plot import (
    BOTTOM,
    DASHES,
    HEIGHT,
    LEFT,
    MARGIN,
    RIGHT,
    TOP,
    WIDTH,
    _log_axis,
    _spread,
    _ticks,
    marker,
    plot_width,
)
from traformer.reports.table import by_length, series_names

NAMES = {
    "bits_per_byte": "bits per byte",
    "word_perplexity": "perplexity per word",
    "perplexity": "perplexity per token",
}


def text_panels(runs: Sequence[Run]) -> list[tuple[str, Panel]]:
    """(metric, panel): bits per byte where tokens are bytes, else perplexity per word; then per token."""
    texts = [run for run in runs if run.config.task == "text"]
    if not texts:
        return []
    all_bytes = all(row["protocol"]["tokenizer"] == "bytes" for run in texts for row in run.rows)
    metrics = ["bits_per_byte"] if all_bytes else ["word_perplexity", "perplexity"]
    return [(metric, panel) for metric in metrics for panel in panels(texts, metric)]


def perplexity_plot(metric: str, panel: Panel, styles: dict[str, int]) -> str:
    """One panel as SVG, both axes on a log scale; lower is better."""
    sizes = sorted({point.size for series in panel.series for point in series.points})
    x = _log_axis(min([*sizes, panel.train_length]), max([*sizes, panel.train_length]))
    y, ticks = _value_axis([point.value for series in panel.series for point in series.points])
    bottom, edge, trained = HEIGHT - BOTTOM, WIDTH - RIGHT + MARGIN, x(panel.train_length)
    name = f"{NAMES[metric]}, {panel.split}"
    ends = "; ".join(f"{s.label} {s.points[-1].value:.4g} at {s.points[-1].length}" for s in panel.series)
    described = escape(f"{name}. {ends}.")
    parts = [
        f'<svg class="plot" viewBox="0 0 {plot_width(panel)} {HEIGHT}" role="img" aria-label="{described}">',
        f'<text class="plot-title" x="{LEFT}" y="20">{escape(name)}</text>',
        f'<rect class="beyond" x="{trained:.1f}" y="{TOP}" width="{edge - trained:.1f}" height="{bottom - TOP}"/>',
    ]
    for value in ticks:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{edge}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 7}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    for size in _ticks(sizes, x):
        parts.append(f'<line class="axis" x1="{x(size):.1f}" x2="{x(size):.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
        parts.append(f'<text class="tick" x="{x(size):.1f}" y="{bottom + 17}" text-anchor="middle">{size:,}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{edge}" y1="{bottom}" y2="{bottom}"/>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        f'<text class="axis-title" x="{middle:.0f}" y="{HEIGHT - 8}" text-anchor="middle">'
        "window in tokens, log scale; lower is better</text>"
    )
    parts.append(f'<line class="trained" x1="{trained:.1f}" x2="{trained:.1f}" y1="{TOP}" y2="{bottom}"/>')
    places = _spread([y(series.points[-1].value) for series in panel.series], 15, TOP + 4, bottom)
    for series, label_y in zip(panel.series, places, strict=True):
        style = styles[series.label]
        dash = f' stroke-dasharray="{DASHES[style % len(DASHES)]}"' if DASHES[style % len(DASHES)] else ""
        line = " ".join(f"{x(point.size):.1f},{y(point.value):.1f}" for point in series.points)
        parts.append(f'<g class="series s{style % 6}"><polyline class="line" points="{line}"{dash}/>')
        for point in series.points:
            text = f"{series.label} at {point.length}: {point.value:.4g} ({point.low:.4g}–{point.high:.4g})"
            parts.append(f"<g>{marker(style, x(point.size), y(point.value))}<title>{escape(text)}</title></g>")
        place = f'x="{x(series.points[-1].size) + 13:.1f}" y="{label_y + 4:.1f}"'
        parts.append(f'<text class="label" {place}>{escape(series.label)}</text></g>')
    parts.append("</svg>")
    return "\n".join(parts)


def _value_axis(values: Sequence[float]):
    """Value -> y on a log scale, and round numbers for its ticks."""
    low, high = min(values), max(values)
    if high / low < 1.1:
        middle = math.sqrt(low * high)
        low, high = middle / 1.05, middle * 1.05
    pad = (high / low) ** 0.06
    low, high = low / pad, high * pad

    def y(value: float) -> float:
        return TOP + (math.log(high) - math.log(value)) / (math.log(high) - math.log(low)) * (HEIGHT - TOP - BOTTOM)

    wanted = [low * (high / low) ** ((step + 0.5) / 5) for step in range(5)]
    return y, sorted({float(f"{value:.2g}") for value in wanted if low < float(f"{value:.2g}") < high})


def html_section(runs: Sequence[Run], styles: dict[str, int]) -> str:
    found = text_panels(runs)
    if not found:
        return ""
    plots = "".join(perplexity_plot(metric, panel, styles) for metric, panel in found)
    tables = "".join(_html_table(metric, panel) for metric, panel in found)
    notes = "".join(f'<p class="sub">{escape(note)}</p>' for note in protocols(runs))
    return f'<section><h2>Text</h2>{notes}<div class="plots">{plots}</div>{tables}</section>'


def _html_table(metric: str, panel: Panel) -> str:
    labels = series_names([panel])
    head = "".join(
        f"<th>{escape(text)}</th>" for text in (f"{NAMES[metric]}, {panel.split}: window", "x trained", *labels)
    )
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>" for cells in text_cells(panel, labels)
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def markdown_lines(runs: Sequence[Run]) -> list[str]:
    lines: list[str] = []
    for metric, panel in text_panels(runs):
        labels = series_names([panel])
        lines += ["", f"## Text, {panel.split}: {NAMES[metric]}", "", f"Trained at window {panel.train_length}.", ""]
        lines.append("| window | x trained | " + " | ".join(labels) + " |")
        lines.append("|---|---|" + "---|" * len(labels))
        lines += ["| " + " | ".join(cells) + " |" for cells in text_cells(panel, labels)]
    if lines:
        lines += ["", *protocols(runs)]
    return lines


def findings(runs: Sequence[Run]) -> list[str]:
    """One sentence a metric: each method at the trained window and at the longest."""
    sentences = []
    for metric, panel in text_panels(runs):
        parts = []
        for series in panel.series:
            first, last = series.points[0], series.points[-1]
            parts.append(f"{series.label} {first.value:.4g} → {last.value:.4g}")
        ends = f"{panel.series[0].points[0].length:,} → {panel.series[0].points[-1].length:,}"
        sentences.append(
            f"Text, {panel.split}, trained at window {panel.train_length}, {NAMES[metric]} at {ends}: "
            f"{'; '.join(parts)}."
        )
    return sentences


def protocols(runs: Sequence[Run]) -> list[str]:
    """How the numbers were measured, each way once."""
    return list(dict.fromkeys(protocol_text(row["protocol"]) for run in runs for row in run.rows if "protocol" in row))


def text_cells(panel: Panel, labels: Sequence[str]) -> list[list[str]]:
    rows = []
    for length, found in by_length(panel).items():
        factor = next(iter(found.values())).size / panel.train_length
        values = [
            f"{found[label].value:.4g} ({found[label].low:.4g}–{found[label].high:.4g})" if label in found else ""
            for label in labels
        ]
        rows.append([str(length), f"{factor:.3g}", *values])
    return rows
