"""`tra stretch RUN [RUN ...]`: runs at lengths far beyond training, side by side."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from traformer.commands.arguments import (
    add_device,
    add_json,
    add_threads,
    joined,
    measurement_rows,
    positive_int,
    print_json,
)
from traformer.commands.watching import ShownWatcher, announce

if TYPE_CHECKING:
    from traformer.runs.measurements import Measurement


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders of one task; the first has no time limit")
    parser.add_argument(
        "--lengths",
        nargs="+",
        metavar="N",
        required=True,
        help="lengths such as 1k,4k,16k,128k,1m, separated by spaces or commas",
    )
    parser.add_argument("--examples", type=positive_int, default=10, help="sequences per length and split (default 10)")
    parser.add_argument(
        "--time-limit",
        type=positive_int,
        default=120,
        metavar="S",
        help="seconds that each row of the second and later runs may take (default 120)",
    )
    parser.add_argument("--chunk", type=positive_int, default=4096, help="tokens read at a time (default 4096)")
    parser.add_argument("--split", action="append", metavar="NAME", help="only this split, such as sparse; repeatable")
    parser.add_argument("--out", metavar="DIR", help="where the table and plot go (default: stretch in the first RUN)")
    parser.add_argument("--seed", type=int, help="seed of the test examples (default: the first run's seed)")
    add_device(parser)
    add_threads(parser)
    add_json(parser)
    parser.add_argument("--again", action="store_true", help="measure again what the runs' results.json already have")


def main(args: argparse.Namespace) -> None:
    for run in args.runs:
        announce(run)
    from traformer.devices import set_threads
    from traformer.evaluation.stretch import stretch
    from traformer.storage import check_folder
    from traformer.terminal import say

    set_threads(args.threads)
    folder = Path(args.out or Path(args.runs[0]) / "stretch")
    check_folder(folder)
    try:
        with ShownWatcher() as watcher:
            stretch(
                args.runs,
                joined(args.lengths) or "",
                args.examples,
                chunk=args.chunk,
                time_limit=args.time_limit,
                splits=args.split,
                seed=args.seed,
                device=args.device,
                again=args.again,
                watcher=watcher,
            )
    except KeyboardInterrupt:
        if stretched(args.runs):
            say("tra: interrupted; this was measured before:")
            show_measured(folder, args.runs, args.json)
        raise
    show_measured(folder, args.runs, args.json)


def stretched(runs: list[str]) -> dict[str, list[Measurement]]:
    """What the runs' stores hold, earlier calls' measurements included."""
    from traformer.runs.folder import RunFolder

    found = {run: [one for one in RunFolder(run).results.read() if one.study == "stretch"] for run in runs}
    return {run: measured for run, measured in found.items() if measured}


def show_measured(folder: Path, runs: list[str], as_json: bool) -> None:
    """Print what was measured, and draw it."""
    from traformer.reports.stretch import stretch_table, write_stretch
    from traformer.runs.folder import versions
    from traformer.storage import make_folder
    from traformer.terminal import show

    measured = stretched(runs)
    written = write_stretch(measured, make_folder(folder), "tra " + shlex.join(sys.argv[1:]), versions())
    if as_json:
        print_json(measurement_rows(measured))
        return
    show(stretch_table(measured), width=170)
    print(f"written to {folder}: {', '.join(file.name for file in written)}")
