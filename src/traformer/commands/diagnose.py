"""`tra diagnose RUN...`: residue and positional up-weighting against length, as table, JSON and plots."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from traformer.commands.arguments import add_device, add_lengths, add_threads, joined, positive_int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="run folders; each attention becomes a line of the plots"
    )
    add_lengths(parser)
    parser.add_argument("--examples", type=positive_int, default=8, help="sequences a length (default 8)")
    parser.add_argument("--queries", type=positive_int, default=32, help="answers looked at in a sequence (default 32)")
    parser.add_argument(
        "--steps",
        help='checkpoints by step: 500, or 100,200, or "all" (default: the newest); several show when heads form',
    )
    add_device(parser)
    add_threads(parser)
    parser.add_argument(
        "--out", metavar="DIR", help="where diagnosis.json and the plots go (default: the first run's folder)"
    )


def main(args: argparse.Namespace) -> None:
    from traformer.commands.watching import ShownWatcher
    from traformer.devices import set_threads
    from traformer.evaluation.diagnose import diagnose_run, summary
    from traformer.reports.diagnosis import diagnosis_table, plot_diagnosis
    from traformer.storage import check_folder, make_folder, write_atomically
    from traformer.terminal import show

    set_threads(args.threads)
    folder = Path(args.out or args.runs[0])
    check_folder(folder)
    rows = []
    with ShownWatcher() as watcher:
        for run in args.runs:
            rows += diagnose_run(
                run,
                joined(args.lengths),
                args.examples,
                args.queries,
                steps=args.steps,
                device=args.device,
                watcher=watcher,
            )
    short = summary(rows)
    show(diagnosis_table(short))
    make_folder(folder)
    plots = plot_diagnosis(rows, short, folder)
    write_atomically(folder / "diagnosis.json", _json(short, rows))
    print(f"written to {folder}: diagnosis.json, {', '.join(plot.name for plot in plots)}")


def _json(summary: list[dict[str, Any]], rows: list[dict[str, Any]]) -> str:
    """A line for each row, six digits a number."""

    def lines(rows: list[dict[str, Any]]) -> str:
        short = ({k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in row.items()} for row in rows)
        return ",\n  ".join(json.dumps(row) for row in short)

    return f'{{"summary": [\n  {lines(summary)}\n ],\n "rows": [\n  {lines(rows)}\n]}}\n'
