"""`tra demo`: the demo experiment as one command."""

from __future__ import annotations

import argparse

from traformer.commands.arguments import positive_int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", default="runs/demo", metavar="DIR", help="where the runs and the report go (default runs/demo)"
    )
    parser.add_argument("--jobs", type=positive_int, help="runs at once (default: one per core)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all runs (default 0)")


def main(args: argparse.Namespace) -> int:
    from traformer.commands.sweep import run_and_report
    from traformer.experiments import demo

    return run_and_report(demo.cells(args.seed), args.out, args.jobs, demo.TITLE)
