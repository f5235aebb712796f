"""What a report draws: one Figure per metric, task and split, with a series per method. Made from the registry of
metrics; `svg`, `png` and `tables` show them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from traformer.evaluation.heads import chosen_heads, head_of
from traformer.reports.collect import Run, display_split, display_task, series_labels, unit_of
from traformer.runs.measurements import Measurement
from traformer.runs.metrics import METRICS, SECTIONS, Metric, metric_named

MANY = 8  # methods, above which lines share no plot and methods are the rows of a table
CURVE_POINTS = 120  # of a training curve, at most
_FIRST = ("tra",)  # methods that come before all others


@dataclass(frozen=True)
class Point:
    """One place of a series: the mean over seeds."""

    x: float
    label: str  # what is at x: "51-100", "1,024"
    value: float | None  # None: not measured, `note` says why
    low: float | None  # of one seed the interval, of several the worst and the best
    high: float | None
    seeds: int
    examples: int
    chance: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Series:
    """Runs that differ in nothing but the seed."""

    label: str
    attention: str
    points: list[Point]

    @property
    def drawn(self) -> list[Point]:
        return [point for point in self.points if point.value is not None]

    @property
    def seeds(self) -> int:
        """How many seeds there are at the place that fewest were measured at."""
        return min(point.seeds for point in self.points)


@dataclass(frozen=True)
class Figure:
    """One metric of one task and split, all methods."""

    metric: Metric
    task: str
    split: str
    section: str
    train_length: int
    edge: float | None  # the end of what training has shown, on the axis
    x_label: str
    series: list[Series] = field(default_factory=list)
    headline: bool = True

    @property
    def is_many(self) -> bool:
        return len(self.series) > MANY

    @property
    def log_x(self) -> bool:
        return self.metric.along != "step"

    @property
    def title(self) -> str:
        """ "Flip-flop sparse: exact match"."""
        where = " ".join(filter(None, [display_task(self.task), display_split(self.split)]))
        return f"{where}: {self.metric.label}" if where else self.metric.label.capitalize()

    @property
    def name(self) -> str:
        """For file names: letters, digits and dashes."""
        words = f"{self.task} {self.train_length} {self.section} {self.split} {self.metric.name}"
        return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")[:100]

    @property
    def places(self) -> list[tuple[float, str]]:
        """Every (x, label) of the figure, in order."""
        return sorted({(point.x, point.label) for series in self.series for point in series.points})

    def height(self, point: Point) -> float:
        """Where the y axis has a point. A log axis has no 0: where no error was seen, it has the upper bound."""
        if self.metric.scale == "log" and point.value == 0 and point.high:
            return point.high
        return point.value or 0.0

    def ranked(self) -> list[Series]:
        """The best first, by the mean beyond the trained range, then within it."""
        sign = -1.0 if self.metric.better == "lower" else 1.0

        def score(series: Series) -> tuple[float, float]:
            beyond = [p.value for p in series.points if p.value is not None and self.edge and p.x > self.edge]
            within = [p.value for p in series.points if p.value is not None and not (self.edge and p.x > self.edge)]
            return sign * sum(beyond), sign * sum(within)

        return sorted(self.series, key=score, reverse=True)


def figures(runs: Sequence[Run]) -> list[Figure]:
    """Every figure of a report, in the order of sections and metrics."""
    labels = series_labels(runs)
    found: dict[tuple[str, str, int, str, str], dict[str, list[Measurement]]] = {}
    for run in runs:
        for one in [*_shown(run), *_training(run)]:
            metric = metric_named(one.metric)
            section = "stretch" if one.study == "stretch" else metric.section
            key = (section, one.task, one.train_length, metric.name, one.split)
            found.setdefault(key, {}).setdefault(labels[run.path], []).append(one)
    made = [_figure(key, by_label) for key, by_label in found.items()]
    sections, metrics = list(SECTIONS), list(METRICS)

    def order(figure: Figure) -> tuple[int, int]:
        name = figure.metric.name
        return sections.index(figure.section), metrics.index(name) if name in METRICS else len(METRICS)

    return sorted(made, key=order)


def _figure(key: tuple[str, str, int, str, str], by_label: dict[str, list[Measurement]]) -> Figure:
    section, task, train_length, name, split = key
    metric = metric_named(name)
    first = next(iter(by_label.values()))[0]
    of_bytes = first.protocol.get("tokenizer") == "bytes"
    series = [Series(label, same[0].attention, _points(same, metric)) for label, same in by_label.items()]
    series.sort(key=lambda one: one.attention not in _FIRST)
    headline = metric.headline and not (metric.not_of_bytes and of_bytes)
    edge, x_label = _edge(first, metric), _x_label(metric, task)
    return Figure(metric, task, split, section, train_length, edge, x_label, series, headline)


def _x_label(metric: Metric, task: str) -> str:
    if metric.along == "length":
        return ("window" if metric.section == "text" else "length") + f" in {unit_of(task)}, log scale"
    return {
        "place": "place in the window, log scale",
        "distance": "distance in tokens, log scale",
        "step": "step",
    }.get(metric.along, metric.along)


def _edge(one: Measurement, metric: Metric) -> float | None:
    if metric.along == "step":
        return None
    return float(one.protocol.get("train_tokens", one.train_length) if metric.along == "distance" else one.train_length)


# Which measurements are drawn -----------------------------------------------------------------------------------


def _shown(run: Run) -> Iterable[Measurement]:
    """Of a run's measurements those that a figure can hold: whole splits; of heads the chosen; the longest window."""
    chosen = chosen_heads(run.of_study("diagnosis"))
    heads = dict(zip(("reading", "marking"), chosen, strict=True)) if chosen else {}
    longest: dict[tuple[str, str], int] = {}
    for one in run.measurements:
        key = (one.metric, one.split)
        longest[key] = max(one.size, longest.get(key, 0))
    for one in run.measurements:
        metric = metric_named(one.metric)
        if one.is_of_group or ("head" in one.at and head_of(one) != heads.get(metric.of_head)):
            continue
        if metric.along == "length" or (metric.along in one.at and one.size == longest[one.metric, one.split]):
            yield one


def _training(run: Run) -> Iterable[Measurement]:
    """The training curve as measurements, thinned to what a plot can show: means over equal parts of the steps."""
    lines = run.training
    share = max(1, -(-len(lines) // CURVE_POINTS))
    first = run.measurements[0]
    for start in range(0, len(lines), share):
        part = lines[start : start + share]
        common = first.replace(
            low=None, high=None, chance=None, note="", study="training", split="", length=first.train_length,
            examples=0, at={"step": part[-1].step}, protocol={}, seed=run.config.seed, step=part[-1].step,
        )  # fmt: skip
        yield common.replace(metric="training_loss", value=sum(line.loss for line in part) / len(part))
        accuracies = [line.accuracy for line in part if line.accuracy is not None]
        if accuracies:
            yield common.replace(metric="training_accuracy", value=sum(accuracies) / len(accuracies))


def _points(measurements: Sequence[Measurement], metric: Metric) -> list[Point]:
    by_place: dict[tuple[float, str], list[Measurement]] = {}
    for one in measurements:
        by_place.setdefault(_place(one, metric), []).append(one)
    points = []
    for (x, label), same in by_place.items():
        values = [one.value for one in same if one.value is not None]
        first = same[0]
        note = "; ".join(dict.fromkeys(one.note for one in same if one.note))
        mean = sum(values) / len(values) if values else None
        # One seed: the interval of its examples. Several: from the worst to the best of them.
        low, high = (first.low, first.high) if len(values) < 2 else (min(values), max(values))
        if metric.format == "rate" and mean == 0:  # no event in any seed: what the widest of their bounds allows
            low, high = 0.0, max((one.high for one in same if one.high is not None), default=None)
        points.append(Point(x, label, mean, low, high, len(same), first.examples, first.chance, note))
    return sorted(points, key=lambda point: point.x)


def _place(one: Measurement, metric: Metric) -> tuple[float, str]:
    if metric.along == "length":
        return float(one.size), str(one.length)
    start = float(one.at[metric.along])
    if "to" in one.at and one.at["to"] != one.at[metric.along]:
        return start, f"{one.at[metric.along]}-{one.at['to']}"
    return start, f"{start:g}"


def labels_of(all_figures: Iterable[Figure]) -> list[str]:
    """The methods of some figures, each once."""
    return list(dict.fromkeys(series.label for figure in all_figures for series in figure.series))


def file_names(all_figures: Sequence[Figure]) -> dict[int, str]:
    """A name without suffix for each figure, by its place in the list; no two are the same."""
    names: dict[int, str] = {}
    for place, figure in enumerate(all_figures):
        name = figure.name
        names[place] = name if name not in names.values() else f"{name}-{place}"
    return names


def figure_folder(out: Path) -> Path:
    return out / "figures"
