"""Figures as tables: of few methods each is a column, of many each is a row. For page, Markdown and terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from rich import box
from rich.table import Table as RichTable

from traformer.evaluation.table import factor_text
from traformer.reports.collect import display_split, display_task
from traformer.reports.figures import MANY, Figure, Point, labels_of
from traformer.runs.metrics import Metric

NAMED = 5  # of many methods, in a sentence
PLACES = {"length": "length", "place": "place", "distance": "distance"}


@dataclass(frozen=True)
class Cell:
    """One entry: a number, its interval, and its share of a bar (0 to 1) where it has one."""

    text: str
    interval: str = ""
    share: float | None = None

    def plain(self) -> str:
        return f"{self.text} ({self.interval})" if self.interval else self.text


@dataclass(frozen=True)
class Table:
    """Header and rows; `beyond` says of each row whether training has shown its length."""

    caption: str
    header: list[str]
    rows: list[list[Cell]]
    beyond: list[bool]


def tables(figures: Sequence[Figure]) -> list[Table]:
    """The tables of one metric of one task and training length, over its splits."""
    if figures[0].metric.along not in PLACES:
        return []
    if len(labels_of(figures)) > MANY:
        return [_by_method(figure) for figure in figures]
    return [_by_place(figures)]


def _by_place(figures: Sequence[Figure]) -> Table:
    """A row per split and place, a column per method."""
    first, labels = figures[0], labels_of(figures)
    along = "window" if first.section == "text" and first.metric.along == "length" else PLACES[first.metric.along]
    with_chance = any(point.chance is not None for figure in figures for s in figure.series for point in s.points)
    header = ["split", along, *(["x trained"] if first.edge else []), *labels, *(["chance"] if with_chance else [])]
    rows, beyond = [], []
    for figure in figures:
        for x, place in figure.places:
            found = {
                s.label: point for s in figure.series for point in s.points if (point.x, point.label) == (x, place)
            }
            cells = [Cell(display_split(figure.split) or "test"), Cell(place)]
            if first.edge:
                cells.append(Cell(factor_text(x / (figure.edge or x))))
            cells += [cell(figure.metric, found.get(label)) for label in labels]
            if with_chance:
                chance = next((point.chance for point in found.values() if point.chance is not None), None)
                cells.append(Cell(figure.metric.text(chance)))
            rows.append(cells)
            beyond.append(figure.edge is not None and x > figure.edge)
    return Table(_caption(first), header, rows, beyond)


def _by_method(figure: Figure) -> Table:
    """A row per method, the best first; a column per place."""
    places = figure.places
    factors = [f" ({factor_text(x / figure.edge)}x)" if figure.edge else "" for x, _ in places]
    header = ["method", "seeds", *(f"{label}{factor}" for (_, label), factor in zip(places, factors, strict=True))]
    rows = []
    for series in figure.ranked():
        found = {(point.x, point.label): point for point in series.points}
        rows.append([Cell(series.label), Cell(str(series.seeds)), *(cell(figure.metric, found.get(p)) for p in places)])
    chance = {(p.x, p.label): p.chance for s in figure.series for p in s.points if p.chance is not None}
    if chance:
        rows.append([Cell("chance"), Cell(""), *(Cell(figure.metric.text(chance.get(p))) for p in places)])
    split = display_split(figure.split)
    return Table(f"{_caption(figure)}{f', {split}' if split else ''}", header, rows, [False] * len(rows))


def _caption(figure: Figure) -> str:
    return f"{figure.metric.label}" + (f", {figure.metric.direction}" if figure.metric.direction else "")


def cell(metric: Metric, point: Point | None) -> Cell:
    if point is None:
        return Cell("")
    if point.value is None:
        return Cell(point.note or "not measured")
    share = min(1.0, max(0.0, point.value)) if metric.scale == "share" else None
    return Cell(metric.text(point.value), metric.interval(point.low, point.high), share)


def html_table(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in table.header)
    rows = []
    for cells, beyond in zip(table.rows, table.beyond, strict=True):
        opening = '<tr class="beyond-row">' if beyond else "<tr>"
        rows.append(f"{opening}{''.join(map(_html_cell, cells))}</tr>")
    name = escape(table.caption[0].upper() + table.caption[1:])
    caption = f"<caption>{name}</caption>"
    body = f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody>"
    return f'<div class="scroll" role="group" tabindex="0" aria-label="{name}"><table>{caption}{body}</table></div>'


def _html_cell(cell: Cell) -> str:
    interval = f" <small>{escape(cell.interval)}</small>" if cell.interval else ""
    if cell.share is None:
        return f"<td>{escape(cell.text)}{interval}</td>"
    return f'<td class="share" style="--share:{100 * cell.share:.1f}%"><b>{escape(cell.text)}</b>{interval}</td>'


def markdown_table(table: Table, quote: Callable[[str], str]) -> list[str]:
    """Lines of Markdown; `quote` escapes text."""
    lines = ["| " + " | ".join(map(quote, table.header)) + " |", "|" + "---|" * len(table.header)]
    lines += ["| " + " | ".join(quote(cell.plain()) for cell in cells) + " |" for cells in table.rows]
    return lines


def rich_table(table: Table, title: str) -> RichTable:
    """For the terminal."""
    from rich.markup import escape as escape_markup

    shown = RichTable(title=escape_markup(title), box=box.SIMPLE_HEAD, title_justify="left")
    for name in table.header:
        shown.add_column(escape_markup(name), justify="left" if name in ("split", "method") else "right")
    for cells in table.rows:
        shown.add_row(*(escape_markup(cell.plain()) for cell in cells))
    return shown


def groups(figures: Sequence[Figure]) -> dict[tuple[str, str, int], dict[str, list[Figure]]]:
    """{(section, task, training length): {metric: figures, one per split}}, in the order of the figures."""
    found: dict[tuple[str, str, int], dict[str, list[Figure]]] = {}
    for figure in figures:
        key = (figure.section, figure.task, figure.train_length)
        found.setdefault(key, {}).setdefault(figure.metric.name, []).append(figure)
    return found


def sample_text(figures: Sequence[Figure]) -> str:
    """What a cell of these tables says, and of how many sequences."""
    points = [point for figure in figures for series in figure.series for point in series.points]
    examples, seeds = ({getattr(point, name) for point in points} for name in ("examples", "seeds"))
    most, label = max(seeds), figures[0].metric.label
    name = label[0].upper() + label[1:]
    what = f"{name} (95 % interval)" if most == 1 else f"{name}, mean of up to {most} seeds (worst–best)"
    counted = "/".join(map(str, sorted(examples - {0})))
    return f"{what}; {counted} sequences per length and run." if counted else f"{what}."


def _named_in_findings(figures: Sequence[Figure]) -> list[str]:
    """All methods; of many the best ones of the first split."""
    labels = labels_of(figures)
    return labels if len(labels) <= MANY else [series.label for series in figures[0].ranked()[:NAMED]]


def findings(figures: Sequence[Figure]) -> list[str]:
    """One sentence per task and headline: how each method does at the farthest place. The reader judges."""
    sentences = []
    for (section, task, train_length), by_metric in groups(figures).items():
        name = next(iter(by_metric))
        members = by_metric[name]
        if section not in ("accuracy", "text", "stretch") or not members[0].headline:
            continue
        metric, last = members[0].metric, max(x for figure in members for x, _ in figure.places)
        parts = []
        for label in _named_in_findings(members):
            values = [
                metric.text(point.value) + (f" {display_split(figure.split)}" if len(members) > 1 else "")
                for figure in members
                for series in figure.series
                for point in series.points
                if series.label == label and point.x == last and point.value is not None
            ]
            if values:
                parts.append(f"{label} {', '.join(values)}")
        left_out = len(labels_of(members)) - len(parts)
        parts += [f"{left_out} more below"] if left_out > 0 else []
        where = f"{last:,.0f}" + (f" ({factor_text(last / train_length)}x)" if train_length else "")
        far = ", read in chunks" if section == "stretch" else ""
        sentences.append(
            f"{display_task(task)}, trained to {train_length:,}{far}, {metric.label} at {where}: {'; '.join(parts)}."
        )
    return sentences
