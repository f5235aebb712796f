"""Figures as SVG: themed by the page's style sheet, readable without colour, nothing to load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape

from traformer.evaluation.table import factor_text
from traformer.reports.axes import Axis, spread, x_axis, y_axis
from traformer.reports.figures import Figure, Point, Series
from traformer.reports.style import DARK_THEME, LIGHT_THEME, PLOT_STYLE, dash, family_style, marker, variables

WIDTH, HEIGHT = 420, 312
LEFT, RIGHT, TOP, BOTTOM = 52, 62, 48, 58
LABEL_GAP, LETTER = 13, 8.2  # from a line's end to its label; width of a letter there
MARGIN = 8  # of the plotting area beyond the longest length
# Of one panel where each of many methods has its own.
SMALL_WIDTH, SMALL_HEIGHT, SMALL_COLUMNS = 206, 132, 6
SMALL_LEFT, SMALL_TOP, SMALL_BOTTOM, SMALL_RIGHT = 40, 26, 24, 10


def figure_svg(figure: Figure, styles: Mapping[str, int]) -> str:
    """One figure. `styles` numbers the series over the whole page, so that a method always looks the same."""
    return _panels(figure) if figure.is_many else _plot(figure, styles)


def standalone(svg: str, follow_reader: bool = False) -> str:
    """The same as a file of its own, with its own style sheet: light, or dark where the reader's system is."""
    dark = f"@media (prefers-color-scheme:dark){{:root,svg{{{variables(DARK_THEME)}}}}}" if follow_reader else ""
    head = f"<style>:root,svg{{{variables(LIGHT_THEME)};background:var(--ground)}}{dark}{PLOT_STYLE}</style>"
    first, rest = svg.split(">", 1)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{first} xmlns="http://www.w3.org/2000/svg">{head}{rest}\n'


def grid_svg(
    figures: Sequence[Figure], styles: Mapping[str, int], heading: str = "", columns: int = 3, footer: str = ""
) -> str:
    """Several figures side by side in one picture, with a line of text above and one below."""
    shown = [figure for figure in figures if any(series.drawn for series in figure.series)]
    widest = max((_width(figure) for figure in shown), default=WIDTH)
    top = 36 if heading else 0
    columns = max(1, min(columns, len(shown)))
    width = max(columns * widest, 24 + round(len(heading) * 8.4))
    height = top + -(-len(shown) // columns) * HEIGHT + (26 if footer else 0)
    words = " ".join(filter(None, [heading, *map(describe, shown), footer]))
    parts = [f'<svg class="plot" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(words)}">']
    if heading:
        parts.append(f'<text class="plot-title" x="12" y="24">{escape(heading)}</text>')
    for place, figure in enumerate(shown):
        left, down = place % columns * widest, top + place // columns * HEIGHT
        inside = _plot(figure, styles).split(">", 1)[1].removesuffix("</svg>")
        parts.append(f'<g transform="translate({left},{down})">{inside}</g>')
    if footer:
        parts.append(f'<text class="note" x="12" y="{height - 10}">{escape(footer)}</text>')
    return "\n".join([*parts, "</svg>"])


def _plot(figure: Figure, styles: Mapping[str, int]) -> str:
    x = x_axis(figure, LEFT + 26, WIDTH - RIGHT)
    y = y_axis(figure, TOP, HEIGHT - BOTTOM)
    bottom, edge = HEIGHT - BOTTOM, WIDTH - RIGHT + MARGIN
    parts = [
        _opening(figure, _width(figure), HEIGHT),
        f'<text class="plot-title" x="{LEFT}" y="20">{escape(figure.title)}</text>',
        *_beyond(figure, x, edge, TOP, bottom),
        *_grid(figure, x, y, LEFT, edge, bottom),
        *_factors(figure, x, bottom),
        f'<text class="axis-title" x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 8}" text-anchor="middle">'
        f"{escape(axis_title(figure))}</text>",
    ]
    if figure.edge is not None:
        trained = x.at(figure.edge)
        parts.append(f'<line class="trained" x1="{trained:.1f}" x2="{trained:.1f}" y1="{TOP}" y2="{bottom}"/>')
        if edge - trained > 98:
            parts.append(f'<text class="note" x="{trained + 5:.1f}" y="{TOP - 6}">never trained on →</text>')
    parts += _chance(figure, x, y)
    shown = [series for series in figure.series if series.drawn]
    for series in shown:  # all of them behind all lines
        parts += _spread_of(figure, series, styles[series.label], x, y)
    names = line_labels(figure)
    for series, label_y in zip(shown, _label_places(figure, shown, y, bottom), strict=True):
        parts += _series(figure, series, styles[series.label], x, y)
        place = f'x="{x.at(series.drawn[-1].x) + LABEL_GAP:.1f}" y="{label_y + 4:.1f}"'
        parts.append(f'<text class="label" {place}>{escape(names[series.label])}</text></g>')
    parts.append("</svg>")
    return "\n".join(parts)


def _label_places(figure: Figure, shown: Sequence[Series], y: Axis, bottom: float) -> list[float]:
    """Where the labels of lines go: at their ends, moved apart where lines end at the same place."""
    places = [0.0] * len(shown)
    for end in {series.drawn[-1].x for series in shown}:
        here = [number for number, series in enumerate(shown) if series.drawn[-1].x == end]
        heights = [y.at(figure.height(shown[number].drawn[-1])) for number in here]
        for number, place in zip(here, spread(heights, 15, TOP + 4, bottom), strict=True):
            places[number] = place
    return places


def _panels(figure: Figure) -> str:
    """A panel per method, the best first; all methods are grey lines behind it, so that each can be compared."""
    ranked = [series for series in figure.ranked() if series.drawn]
    rows = -(-len(ranked) // SMALL_COLUMNS)
    width, height = SMALL_COLUMNS * SMALL_WIDTH, 34 + rows * SMALL_HEIGHT + 22
    parts = [
        _opening(figure, width, height),
        f'<text class="plot-title" x="8" y="20">{escape(figure.title)}</text>',
    ]
    x = x_axis(figure, SMALL_LEFT + 8, SMALL_WIDTH - SMALL_RIGHT - 6)
    y = y_axis(figure, SMALL_TOP, SMALL_HEIGHT - SMALL_BOTTOM)
    places = [place for place, _ in figure.places]
    first = figure.edge if figure.edge in places else places[0]
    ends = Axis(x.at, sorted({first, places[-1]}) if figure.log_x else [x.ticks[0], x.ticks[-1]])
    sides = Axis(y.at, [y.ticks[0], y.ticks[-1]] if len(y.ticks) > 1 else y.ticks)
    bottom, edge = SMALL_HEIGHT - SMALL_BOTTOM, SMALL_WIDTH - SMALL_RIGHT
    # Every panel has the same background, so it is written once.
    background = f"all-{figure.name}"
    lines = "".join(f'<polyline class="others" points="{_line(figure, series, x, y)}"/>' for series in ranked)
    parts.append(f'<defs><g id="{background}">{lines}</g></defs>')
    for place, series in enumerate(ranked):
        left, top = place % SMALL_COLUMNS * SMALL_WIDTH, 34 + place // SMALL_COLUMNS * SMALL_HEIGHT
        parts.append(f'<g transform="translate({left},{top})">')
        parts += _beyond(figure, x, edge, SMALL_TOP, bottom)
        parts += _grid(figure, ends, sides, SMALL_LEFT, edge, bottom)
        parts.append(f'<use href="#{background}"/>')
        if figure.edge is not None:
            trained = x.at(figure.edge)
            parts.append(
                f'<line class="trained" x1="{trained:.1f}" x2="{trained:.1f}" y1="{SMALL_TOP}" y2="{bottom}"/>'
            )
        parts += _chance(figure, x, y, named=False)
        style = family_style(series.attention)
        parts += _spread_of(figure, series, style, x, y)
        parts += [*_series(figure, series, style, x, y, radius=2.8, dashed=False), "</g>"]
        parts.append(f'<text x="{SMALL_LEFT}" y="{SMALL_TOP - 8}">{escape(clipped(series.label))}</text></g>')
    parts.append(
        f'<text class="axis-title" x="8" y="{height - 7}">{escape(axis_title(figure))}; the best first; '
        "blue: TRA's family, orange: others, grey: all methods</text></svg>"
    )
    return "\n".join(parts)


def _opening(figure: Figure, width: int, height: int) -> str:
    described = escape(describe(figure))
    return f'<svg class="plot" viewBox="0 0 {width} {height}" role="img" aria-label="{described}">'


def axis_title(figure: Figure) -> str:
    """The x axis, and which way is better where 0 to 100 % does not say it."""
    direction = "" if figure.metric.scale == "share" else figure.metric.direction
    return "; ".join(filter(None, [figure.x_label, direction]))


def _beyond(figure: Figure, x: Axis, edge: float, top: float, bottom: float) -> list[str]:
    """What training never showed, shaded."""
    if figure.edge is None:
        return []
    trained = x.at(figure.edge)
    width = max(0.0, edge - trained)
    return [f'<rect class="beyond" x="{trained:.1f}" y="{top}" width="{width:.1f}" height="{bottom - top:.1f}"/>']


def _grid(figure: Figure, x: Axis, y: Axis, left: float, right: float, bottom: float) -> list[str]:
    parts = []
    for value in y.ticks:
        height = y.at(value)
        parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{height:.1f}" y2="{height:.1f}"/>')
        text = escape(tick_text(figure, value))
        parts.append(f'<text class="tick" x="{left - 7}" y="{height + 4:.1f}" text-anchor="end">{text}</text>')
    for value in x.ticks:
        place = x.at(value)
        parts.append(f'<line class="axis" x1="{place:.1f}" x2="{place:.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
        parts.append(
            f'<text class="tick" x="{place:.1f}" y="{bottom + 17}" text-anchor="middle">{length_text(value)}</text>'
        )
    parts.append(f'<line class="axis" x1="{left}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    return parts


def _factors(figure: Figure, x: Axis, bottom: float) -> list[str]:
    """Below the lengths: how many times the trained one they are."""
    if figure.edge is None or figure.metric.along != "length":
        return []
    texts = {value: "trained" if value == figure.edge else f"{factor_text(value / figure.edge)}×" for value in x.ticks}
    return [
        f'<text class="tick" x="{x.at(value):.1f}" y="{bottom + 30}" text-anchor="middle">{text}</text>'
        for value, text in texts.items()
    ]


def tick_text(figure: Figure, value: float) -> str:
    """A number beside the y axis."""
    if figure.metric.format == "percent":
        return f"{100 * value:.0f}%"
    if figure.metric.format == "count" and value >= 1:
        return length_text(value)
    return f"{value:.0e}" if 0 < value < 1e-3 else f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


def length_text(length: float) -> str:
    """1024 -> 1,024; 65536 -> 64k, 1048576 -> 1M."""
    for unit, letter in ((1 << 20, "M"), (1 << 10, "k")):
        if length >= max(unit, 10_000) and length % unit == 0:
            return f"{length / unit:.0f}{letter}"
    return f"{length:,.0f}"


def _chance(figure: Figure, x: Axis, y: Axis, named: bool = True) -> list[str]:
    by_place = {p.x: p.chance for s in figure.series for p in s.points if p.chance is not None}
    chance = sorted(by_place.items())
    if not chance:
        return []
    if len(chance) == 1:
        chance = [(chance[0][0] * 0.97, chance[0][1]), (chance[0][0] * 1.03, chance[0][1])]
    points = " ".join(f"{x.at(place):.1f},{y.at(value):.1f}" for place, value in chance)
    parts = [f'<polyline class="chance" points="{points}"/>']
    if named:
        place, value = chance[0]
        parts.append(f'<text class="note" x="{x.at(place) + 8:.1f}" y="{y.at(value) - 5:.1f}">chance</text>')
    return parts


def _line(figure: Figure, series: Series, x: Axis, y: Axis) -> str:
    return " ".join(f"{x.at(point.x):.1f},{y.at(figure.height(point)):.1f}" for point in series.drawn)


def _series(
    figure: Figure, series: Series, style: int, x: Axis, y: Axis, radius: float = 4.2, dashed: bool = True
) -> list[str]:
    """Line and markers; the group is left open for a label."""
    points = series.drawn
    parts = [f'<g class="series s{style % 6}">']
    strokes = " ".join(f"{length:g}" for length in dash(style)) if dashed else ""
    drawn_dash = f' stroke-dasharray="{strokes}"' if strokes else ""
    parts.append(f'<polyline class="line" points="{_line(figure, series, x, y)}"{drawn_dash}/>')
    if len(points) > 40:  # a curve: markers would hide it
        return parts
    for point in points:
        kind = "bound" if point.value == 0 and figure.metric.scale == "log" else ""
        mark = marker_svg(style, x.at(point.x), y.at(figure.height(point)), radius, kind)
        parts.append(f"<g>{mark}<title>{escape(point_text(figure, series, point))}</title></g>")
    return parts


def _spread_of(figure: Figure, series: Series, style: int, x: Axis, y: Axis) -> list[str]:
    """Several seeds: a band from the worst to the best. One: the interval of its examples at each point."""
    ends = [(p, p.low, p.high) for p in series.drawn if p.low is not None and p.high is not None]
    if figure.metric.scale == "log":
        ends = [(p, low, high) for p, low, high in ends if p.seeds > 1 and high > 0]
    if len(ends) > 1 and all(p.seeds > 1 for p, _, _ in ends):
        there = " ".join(f"{x.at(p.x):.1f},{y.at(high):.1f}" for p, _, high in ends)
        back = " ".join(f"{x.at(p.x):.1f},{y.at(low):.1f}" for p, low, _ in reversed(ends))
        shapes = [f'<polygon class="band" points="{there} {back}"/>']
    else:
        shapes = [
            f'<line class="interval" x1="{x.at(p.x):.1f}" x2="{x.at(p.x):.1f}"'
            f' y1="{y.at(low):.1f}" y2="{y.at(high):.1f}"/>'
            for p, low, high in ends
        ]
    return [f'<g class="series s{style % 6}">', *shapes, "</g>"] if shapes else []


def _width(figure: Figure) -> int:
    """Of the whole picture: wider where a label at a line's end, or the title, needs the room."""
    longest = max(map(len, line_labels(figure).values()), default=0)
    labels = WIDTH + max(0, round(longest * LETTER) + LABEL_GAP - RIGHT)
    return max(labels, LEFT + round(len(figure.title) * 7.4))


def line_labels(figure: Figure) -> dict[str, str]:
    """What is written at each line's end: the method's name, and its settings where two lines have the same name."""
    names = {series.label: series.label.split(" (")[0] for series in figure.series}
    counts = Counter(names.values())
    return {label: clipped(name if counts[name] == 1 else label) for label, name in names.items()}


def clipped(label: str, most: int = 26) -> str:
    """A label of at most so many letters."""
    return label if len(label) <= most else f"{label[: most - 1]}…"


def marker_svg(style: int, x: float, y: float, r: float = 4.2, kind: str = "") -> str:
    shape, name = marker(style), f"marker {kind}".strip()
    if shape == "circle":
        return f'<circle class="{name}" cx="{x:.1f}" cy="{y:.1f}" r="{r}"/>'
    if shape == "square":
        return f'<rect class="{name}" x="{x - r:.1f}" y="{y - r:.1f}" width="{2 * r}" height="{2 * r}"/>'
    if shape == "triangle":
        corners = f"{x:.1f},{y - r - 1:.1f} {x - r - 1:.1f},{y + r:.1f} {x + r + 1:.1f},{y + r:.1f}"
    elif shape == "diamond":
        corners = (
            f"{x:.1f},{y - r - 1.5:.1f} {x + r + 1.5:.1f},{y:.1f} {x:.1f},{y + r + 1.5:.1f} {x - r - 1.5:.1f},{y:.1f}"
        )
    else:
        return (
            f'<path class="marker open" d="M{x - r:.1f} {y - r:.1f} l{2 * r} {2 * r} m0 {-2 * r} l{-2 * r} {2 * r}"/>'
        )
    return f'<polygon class="{name}" points="{corners}"/>'


def legend(styles: Mapping[str, int]) -> str:
    """The series of the page, each with its line and marker."""
    items = []
    for label, style in styles.items():
        strokes = " ".join(f"{length:g}" for length in dash(style))
        stroke = f' stroke-dasharray="{strokes}"' if strokes else ""
        items.append(
            f'<span class="legend-item"><svg class="series s{style % 6}" width="44" height="14" aria-hidden="true">'
            f'<line class="line" x1="2" x2="42" y1="7" y2="7"{stroke}/>{marker_svg(style, 22, 7)}</svg>'
            f"{escape(label)}</span>"
        )
    return f'<p class="legend">{"".join(items)}</p>' if items else ""


def point_text(figure: Figure, series: Series, point: Point) -> str:
    """What hovering over a point shows."""
    metric = figure.metric
    details = [metric.interval(point.low, point.high)]
    details.append(f"{point.seeds} seeds, worst to best" if point.seeds > 1 else "95 % interval" if details[0] else "")
    details.append(f"{point.examples} sequences" if point.examples else "")
    shown = ", ".join(filter(None, details))
    return f"{series.label} at {point.label}: {metric.text(point.value)}" + (f" ({shown})" if shown else "")


def describe(figure: Figure) -> str:
    """The figure in words, for those who do not see it."""
    ends = "; ".join(
        f"{series.label} {figure.metric.text(series.drawn[-1].value)} at {series.drawn[-1].label}"
        for series in figure.series
        if series.drawn
    )
    trained = f", trained to {figure.train_length}" if figure.edge is not None else ""
    return f"{figure.title}, by {figure.x_label}{trained}. {ends}."
