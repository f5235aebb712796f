"""Figures drawn by matplotlib, in the style of the page: for PNG files, `tra stretch` and `tra diagnose`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from traformer.reports.axes import y_axis
from traformer.reports.figures import Figure, Series, labels_of
from traformer.reports.style import MATPLOTLIB_MARKERS, colour, dash, marker
from traformer.reports.svg import length_text, tick_text

DPI = 130
PANEL = (4.6, 3.5)  # inches
COLUMNS = 3
SMALL_COLUMNS = 6


def pyplot() -> Any:
    """matplotlib without a display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def series_styles(figures: Sequence[Figure]) -> dict[str, int]:
    return {label: number for number, label in enumerate(labels_of(figures))}


def save_figure(figure: Figure, file: Path, styles: Mapping[str, int]) -> None:
    """One figure as a file; the suffix decides the format."""
    if figure.is_many:
        _save_panels(figure, file, styles)
    else:
        save_grid([figure], file, styles)


def save_grid(
    figures: Sequence[Figure], file: Path, styles: Mapping[str, int] | None = None, heading: str = ""
) -> None:
    """Several figures side by side, one legend for all."""
    plt = pyplot()
    styles = styles or series_styles(figures)
    columns = min(COLUMNS, len(figures))
    rows = -(-len(figures) // columns)
    picture, grid = plt.subplots(
        rows, columns, figsize=(PANEL[0] * columns + 0.6, PANEL[1] * rows + 0.5), squeeze=False, layout="constrained"
    )
    for axes, figure in zip(grid.flat, figures, strict=False):
        draw(axes, figure, styles)
    for axes in list(grid.flat)[len(figures) :]:
        axes.set_visible(False)
    handles: dict[str, Any] = {}
    for axes in grid.flat:
        handles.update({str(label): handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)})
    if handles:
        ordered = sorted(handles, key=lambda label: styles.get(label, len(styles)))
        picture.legend(
            [handles[label] for label in ordered], ordered, loc="outside lower center", ncols=min(6, len(ordered)),
            fontsize=8, frameon=False,
        )  # fmt: skip
    if heading:
        picture.suptitle(heading, fontsize=12)
    picture.savefig(file, dpi=DPI)
    plt.close(picture)


def _save_panels(figure: Figure, file: Path, styles: Mapping[str, int]) -> None:
    """A panel per method, the others in grey behind it."""
    plt = pyplot()
    ranked = [series for series in figure.ranked() if series.drawn]
    rows = -(-len(ranked) // SMALL_COLUMNS)
    picture, grid = plt.subplots(
        rows, SMALL_COLUMNS, figsize=(13, 1.7 * rows + 0.6), squeeze=False, sharex=True, sharey=True,
        layout="constrained",
    )  # fmt: skip
    for axes, series in zip(grid.flat, ranked, strict=False):
        for other in ranked:
            if other is not series:
                points = other.drawn
                axes.plot([p.x for p in points], [p.height for p in points], color="#d0d7de", linewidth=0.8, zorder=1)
        _set_axes(axes, figure)
        _draw_series(axes, figure, series, styles[series.label])
        axes.set_title(series.label, fontsize=9, loc="left")
    for axes in list(grid.flat)[len(ranked) :]:
        axes.set_visible(False)
    picture.suptitle(figure.title, fontsize=11)
    picture.savefig(file, dpi=DPI)
    plt.close(picture)


def draw(axes: Any, figure: Figure, styles: Mapping[str, int]) -> None:
    """One figure into matplotlib's axes."""
    _set_axes(axes, figure)
    for series in figure.series:
        if series.drawn:
            _draw_series(axes, figure, series, styles[series.label])
    axes.set_title(figure.title, fontsize=10, loc="left")
    axes.set_xlabel(figure.x_label, fontsize=9)


def _set_axes(axes: Any, figure: Figure) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

    if figure.log_x:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: length_text(value)))
        axes.xaxis.set_minor_formatter(NullFormatter())
        places = [x for x, _ in figure.places]
        if len(places) <= 8:
            axes.xaxis.set_major_locator(FixedLocator(places))
    if figure.metric.scale == "share":
        axes.set_ylim(-0.03, 1.03)
    elif figure.metric.scale == "log" and all((p.height or 0) > 0 for s in figure.series for p in s.drawn):
        axes.set_yscale("log")
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_locator(FixedLocator(y_axis(figure, 0, 1).ticks))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tick_text(figure, value)))
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    if figure.edge is not None:
        axes.axvline(figure.edge, color="#1b1f24", linewidth=1.2)
    chance = sorted({(p.x, p.chance) for s in figure.series for p in s.points if p.chance is not None})
    if chance:
        axes.plot(*zip(*chance, strict=True), color="#57606a", linestyle=":", linewidth=1.4, label="chance")


def _draw_series(axes: Any, figure: Figure, series: Series, style: int) -> None:
    points = series.drawn
    xs, heights = [p.x for p in points], [p.height for p in points]
    strokes = dash(style)
    axes.plot(
        xs, heights, color=colour(style), label=series.label, linewidth=1.7, markersize=4.5, zorder=3,
        linestyle=(0, tuple(length / 2 for length in strokes)) if strokes else "-",
        marker=MATPLOTLIB_MARKERS[marker(style)] if len(points) <= 40 else None,
    )  # fmt: skip
    ends = [(p.x, p.low, p.high) for p in points if p.seeds > 1 and p.low is not None and p.high is not None]
    if ends:
        axes.fill_between(*zip(*ends, strict=True), color=colour(style), alpha=0.16, linewidth=0, zorder=2)
    if figure.metric.scale == "log":
        for point in points:
            if point.value == 0 and point.high:  # none seen: the true value is somewhere below the bound
                axes.annotate(
                    "", (point.x, point.high / 2), (point.x, point.high),
                    arrowprops={"arrowstyle": "->", "color": colour(style)},
                )  # fmt: skip
