"""`tra stretch RUN [RUN ...]`: runs at lengths far beyond training, side by side."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from traformer.commands.arguments import add_device, add_threads, joined, positive_int
from traformer.commands.watching import ShownWatcher


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders of one task; the first has no time limit")
    parser.add_argument(
        "--lengths", nargs="+", metavar="N", required=True, help="such as 1k,4k,16k,128k,1m, with blanks or commas"
    )
    parser.add_argument("--examples", type=positive_int, default=10, help="sequences a length and split (default 10)")
    parser.add_argument(
        "--time-limit",
        type=positive_int,
        default=120,
        metavar="S",
        help="seconds that a row of the second and further runs may take (default 120)",
    )
    parser.add_argument("--chunk", type=positive_int, default=4096, help="tokens read at a time (default 4096)")
    parser.add_argument("--split", action="append", metavar="NAME", help="only this split, such as sparse; repeatable")
    parser.add_argument("--out", metavar="DIR", help="where the table and plot go (default: stretch in the first RUN)")
    parser.add_argument("--seed", type=int, help="whose test stream (default: the first run's seed)")
    add_device(parser)
    add_threads(parser)
    parser.add_argument("--again", action="store_true", help="measure again what stretch.json already has")


def main(args: argparse.Namespace) -> None:
    from traformer.devices import set_threads
    from traformer.evaluation.stretch import read_rows, stretch
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
                out=folder,
                chunk=args.chunk,
                time_limit=args.time_limit,
                splits=args.split,
                seed=args.seed,
                device=args.device,
                again=args.again,
                watcher=watcher,
            )
    except KeyboardInterrupt:
        if read_rows(folder / "stretch.json"):
            say("tra: interrupted; this was measured before:")
            show_measured(folder, args.runs)
        raise
    show_measured(folder, args.runs)


def show_measured(folder: Path, runs: list[str]) -> None:
    """Print the rows that the file holds of these runs, earlier calls' included, and draw them."""
    from traformer.evaluation.stretch import read_rows
    from traformer.reports.stretch import plot_stretch, stretch_markdown, stretch_table
    from traformer.runs.folder import versions
    from traformer.storage import write_atomically
    from traformer.terminal import show

    rows = [row for row in read_rows(folder / "stretch.json") if row["run"] in runs]
    rows.sort(key=lambda row: (row["split"], row["size"], runs.index(row["run"])))
    show(stretch_table(rows), width=170)
    command = "tra " + shlex.join(sys.argv[1:])
    write_atomically(folder / "stretch.md", stretch_markdown(rows, command, versions()))
    plot = plot_stretch(rows, folder)
    print(f"written to {folder}: stretch.json, stretch.md, {plot.name}")
