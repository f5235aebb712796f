"""Figures of an experiment under a protocol, drawn from its committed counts (cells.csv, see experiments/summary.py).

    python -m traformer.reports.overview results/what_works

writes into the same folder `headline.svg` and `.png`, which README shows (a panel for each task: TRA's family and the
best peers), and for each task and split a figure of every arm, such as `copy-test.svg` and `.png`. Only arms are drawn
whose seeds are all there. Give it again when cells.csv has changed; a test compares the files with it.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from traformer.errors import InputError, TraformerError
from traformer.methods import EQUAL_RECIPE, EXTENSION, METHODS, PEER, SKYLINE, TRA, label_of
from traformer.reports.collect import unit_of
from traformer.reports.figures import Figure, Point, Series, labels_of
from traformer.reports.svg import figure_svg, grid_svg, standalone
from traformer.runs.metrics import METRICS
from traformer.storage import write_atomically

CELLS = "cells.csv"
COLUMNS = ("setting", "arm", "split", "length", "seed", "right", "examples", "chance")
BEST_PEERS = 4  # in the headline
# Of a task with several splits, the one in the headline: what is to be remembered is farthest away there.
_HEADLINE_SPLITS = ("test", "sparse")


def read_figures(file: Path) -> list[Figure]:
    """A figure for each setting and split, with a series per arm; the shortest length is the trained one."""
    try:
        with open(file, encoding="utf-8", newline="") as lines:
            reader = csv.DictReader(lines)
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
            rows = list(reader)
    except OSError as error:
        raise InputError(f"{file}: {error.strerror}; give a folder of results with {CELLS}") from error
    if missing or not rows:
        raise InputError(f"{file} has no {f'column {missing[0]!r}' if missing else 'rows'}; write it with summary.py")
    places: dict[tuple[str, str], dict[str, dict[int, list[dict[str, str]]]]] = {}
    try:
        for row in rows:
            by_arm = places.setdefault((row["setting"], row["split"]), {})
            by_arm.setdefault(row["arm"], {}).setdefault(int(row["length"]), []).append(row)
        return [_figure(setting, split, by_arm) for (setting, split), by_arm in places.items()]
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise InputError(f"{file} holds something else than counts: {error}") from error


def _figure(setting: str, split: str, by_arm: Mapping[str, Mapping[int, list[dict[str, str]]]]) -> Figure:
    all_seeds = max(len(same) for by_length in by_arm.values() for same in by_length.values())
    series = [
        Series(label_of(_name(arm)), _name(arm), [_point(length, same) for length, same in sorted(by_length.items())])
        for arm, by_length in by_arm.items()
        if min(len(same) for same in by_length.values()) == all_seeds
    ]
    trained = min(length for by_length in by_arm.values() for length in by_length)
    x_label = f"length in {unit_of(setting)}, log scale"
    return Figure(METRICS["exact_match"], setting, split, "accuracy", trained, float(trained), x_label, series)


def _name(arm: str) -> str:
    """What the catalogue calls an arm; one that leaves a part of `tra_plus` out is named for the part alone."""
    left_out = f"tra_plus_{arm}"
    return left_out if left_out in METHODS else arm


def _point(length: int, same: Sequence[Mapping[str, str]]) -> Point:
    shares = [int(row["right"]) / int(row["examples"]) for row in same]
    chance = float(same[0]["chance"]) if same[0]["chance"] else None
    mean = sum(shares) / len(shares)
    return Point(
        float(length), str(length), mean, min(shares), max(shares), len(same), int(same[0]["examples"]), chance
    )


def headline(figures: Sequence[Figure]) -> list[Figure]:
    """A figure for each task: TRA's family and the best peers, by accuracy beyond the trained length."""
    return [_chosen(figure) for figure in figures if figure.split in _HEADLINE_SPLITS]


def _chosen(figure: Figure) -> Figure:
    ranked = figure.ranked()
    family = [series for series in ranked if _kind(series) in (TRA, EXTENSION)]
    peers = [series for series in ranked if _kind(series) in (PEER, EQUAL_RECIPE, SKYLINE)]
    # Until peers have run there are only the recipe's own parts to compare with.
    shown = [*family, *peers[:BEST_PEERS]] if peers else ranked[: BEST_PEERS + 2]
    return replace(figure, series=shown)


def _kind(series: Series) -> str:
    return METHODS[series.attention].kind if series.attention in METHODS else ""


def pictures(folder: Path) -> dict[str, str]:
    """{name of a file without its suffix: SVG}."""
    figures = read_figures(folder / CELLS)
    first = headline(figures)
    seeds = max(series.seeds for figure in first for series in figure.series)
    heading = f"Exact match beyond the trained length: mean of {seeds} seeds, worst to best shaded"
    styles = {label: number for number, label in enumerate(labels_of(first))}
    drawn = {"headline": grid_svg(first, styles, heading, columns=2)}
    for figure in figures:
        own = {label: number for number, label in enumerate(labels_of([figure]))}
        drawn[f"{figure.task}-{figure.split}"] = figure_svg(figure, own)
    return drawn


def main(arguments: Sequence[str]) -> int:
    from traformer.reports.png import save_png

    if len(arguments) != 1:
        print("usage: python -m traformer.reports.overview RESULTS", file=sys.stderr)
        return 2
    folder = Path(arguments[0])
    try:
        drawn = pictures(folder)
    except TraformerError as error:
        print(f"tra: error: {error}", file=sys.stderr)
        return 2
    for name, svg in drawn.items():
        write_atomically(folder / f"{name}.svg", standalone(svg, follow_reader=True))
        save_png(svg, folder / f"{name}.png")
    print(f"written to {folder}: {', '.join(f'{name}.svg and .png' for name in drawn)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
