"""Figures of an experiment under a protocol, drawn from its committed counts (cells.csv, see experiments/summary.py).

    python -m traformer.reports.overview results/what_works

writes into the same folder `headline.svg` and `.png`, which README shows (the demo's runs far beyond training, then a
panel for each task in which peers were measured: TRA's family and the best peers), and for each task and split a figure
of every arm, such as `copy-test.svg` and `.png`. Only arms whose seeds are all there are drawn. Run it again when
cells.csv has changed; a test compares the files with it.
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
from traformer.reports.farthest import farthest
from traformer.reports.figures import Figure, Point, Series, labels_of
from traformer.reports.svg import figure_svg, grid_svg, standalone
from traformer.runs.metrics import METRICS
from traformer.storage import write_atomically

CELLS = "cells.csv"
COLUMNS = ("setting", "arm", "split", "length", "seed", "right", "examples", "chance")
BEST_PEERS = 3  # in the headline, and beside them
USUAL = "rope"  # what most models have
# Of a task with several splits, the one in the headline: what is to be remembered is farthest away there.
_HEADLINE_SPLITS = ("test", "sparse")
_PEERS = (PEER, EQUAL_RECIPE, SKYLINE)


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
    shares = [float(row["right"]) / int(row["examples"]) for row in same]
    chance = float(same[0]["chance"]) if same[0]["chance"] else None
    mean = sum(shares) / len(shares)
    return Point(
        float(length), str(length), mean, min(shares), max(shares), len(same), int(same[0]["examples"]), chance
    )


def headline(figures: Sequence[Figure]) -> list[Figure]:
    """A figure for each task with peers: TRA's family and the best of them, by accuracy beyond the trained length."""
    candidates = [figure for figure in figures if figure.split in _HEADLINE_SPLITS]
    compared = [figure for figure in candidates if any(_kind(series) in _PEERS for series in figure.series)]
    return [_chosen(figure) for figure in compared or candidates]


def _chosen(figure: Figure) -> Figure:
    ranked = figure.ranked()
    family = [series for series in ranked if _kind(series) in (TRA, EXTENSION)]
    peers = [series for series in ranked if _kind(series) in _PEERS]
    peers = [*peers[:BEST_PEERS], *(series for series in peers[BEST_PEERS:] if series.attention == USUAL)]
    # Until peers have run there are only the recipe's own parts to compare with.
    shown = [*family, *peers] if peers else ranked[: BEST_PEERS + 2]
    seeds = min(series.seeds for series in shown)
    return replace(figure, series=shown, x_label=f"{figure.x_label}; {seeds} seeds, worst to best shaded")


def _kind(series: Series) -> str:
    return METHODS[series.attention].kind if series.attention in METHODS else ""


def _names(figures: Sequence[Figure]) -> str:
    """What the names in the figures stand for, where they do not say it themselves."""
    series = [one for figure in figures for one in figure.series]
    recipe = next((one.label for one in series if _kind(one) == EXTENSION), None)
    equal = [one.label for one in series if _kind(one) == EQUAL_RECIPE]
    told = [f"{recipe}: this project's recipe around TRA"] if recipe else []
    told += [f"{', '.join(dict.fromkeys(equal))}: peers given the same recipe"] if equal else []
    return "; ".join(told)


def pictures(folder: Path) -> dict[str, str]:
    """{name of a file without its suffix: SVG}."""
    figures = read_figures(folder / CELLS)
    far = farthest(folder.parent)
    first = [*([far] if far else []), *headline(figures)]
    styles = {label: number for number, label in enumerate(labels_of(first))}
    drawn = {"headline": grid_svg(first, styles, "Trained short, tested long", footer=_names(first), columns=2)}
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
