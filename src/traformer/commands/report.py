"""`tra report DIR...`: a page, a Markdown file and a CSV from measured runs."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from traformer.commands.arguments import add_json, measurement_rows, print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", nargs="+", metavar="DIR", help="run folders, or folders that hold run folders")
    parser.add_argument("--out", metavar="DIR", help="where the page and its files go (default: the first DIR)")
    parser.add_argument("--title", help="the page's title")
    parser.add_argument(
        "--experiment",
        metavar="NAME",
        help="an experiment (a name, a .py file or a module) whose hypotheses the report prints with their outcomes",
    )
    add_json(parser)


def main(args: argparse.Namespace) -> None:
    from pathlib import Path

    from traformer.reports.collect import collect
    from traformer.reports.terminal import comparison_table, verdict_tables
    from traformer.reports.verdicts import verdicts_of
    from traformer.reports.write import write_report
    from traformer.storage import make_folder
    from traformer.terminal import show

    runs = collect(args.folders)
    verdicts = verdicts_of(args.experiment, args.folders[0]) if args.experiment else []
    out = make_folder(Path(args.out or args.folders[0]))
    page = write_report(runs, out, args.title, verdicts)
    if args.json:
        measured = measurement_rows({run.name: run.measurements for run in runs})
        print_json({"page": str(page), "measurements": measured, "verdicts": [asdict(one) for one in verdicts]})
        return
    show(*comparison_table(runs), *verdict_tables(verdicts), width=140)
    print(f"written: {page}, {page.with_suffix('.md').name}, {page.with_suffix('.csv').name} and figures/")
