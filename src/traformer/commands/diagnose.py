"""`tra diagnose RUN...`: residue and positional up-weighting against length, as table, JSON and plots."""

from __future__ import annotations

import argparse
from pathlib import Path

from traformer.commands.arguments import (
    add_device,
    add_json,
    add_lengths,
    add_threads,
    joined,
    measurement_rows,
    positive_int,
    print_json,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="run folders; each attention becomes a line of the plots"
    )
    add_lengths(parser)
    parser.add_argument("--examples", type=positive_int, default=8, help="sequences per length (default 8)")
    parser.add_argument("--queries", type=positive_int, default=32, help="answers examined per sequence (default 32)")
    parser.add_argument(
        "--steps",
        help='checkpoints by step: 500, or 100,200, or "all" (default: the newest); several show when heads form',
    )
    add_device(parser)
    add_threads(parser)
    parser.add_argument("--again", action="store_true", help="measure again what the runs' results.json already have")
    add_json(parser)
    parser.add_argument(
        "--out", metavar="DIR", help="where diagnosis.json and the plots go (default: diagnosis in the first RUN)"
    )


def main(args: argparse.Namespace) -> None:
    from traformer.commands.watching import ShownWatcher, announce

    for run in args.runs:
        announce(run)
    from traformer.devices import set_threads
    from traformer.evaluation.diagnose import diagnose_run
    from traformer.reports.diagnosis import diagnosis_table, write_diagnosis
    from traformer.storage import check_folder, make_folder
    from traformer.terminal import show

    set_threads(args.threads)
    folder = Path(args.out or Path(args.runs[0]) / "diagnosis")
    check_folder(folder)
    measured = {}
    with ShownWatcher() as watcher:
        for run in args.runs:
            measured[run] = diagnose_run(
                run,
                joined(args.lengths),
                args.examples,
                args.queries,
                steps=args.steps,
                device=args.device,
                again=args.again,
                watcher=watcher,
            )
    written = write_diagnosis(measured, make_folder(folder))
    if args.json:
        print_json(measurement_rows(measured))
        return
    show(diagnosis_table(measured))
    print(f"written to {folder}: {', '.join(file.name for file in written)}; `tra report` also shows it")
