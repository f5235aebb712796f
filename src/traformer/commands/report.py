"""`tra report DIR...`: a page, a Markdown file and a CSV from measured runs."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", nargs="+", metavar="DIR", help="run folders, or folders that hold run folders")
    parser.add_argument("--out", metavar="DIR", help="where report.html, .md and .csv go (default: the first DIR)")
    parser.add_argument("--title", help="the page's title")


def main(args: argparse.Namespace) -> None:
    from pathlib import Path

    from traformer.reports.collect import collect
    from traformer.reports.terminal import comparison_table
    from traformer.reports.write import write_report
    from traformer.storage import make_folder
    from traformer.terminal import show

    runs = collect(args.folders)
    out = make_folder(Path(args.out or args.folders[0]))
    page = write_report(runs, out, args.title)
    show(*comparison_table(runs), width=140)
    print(f"written: {page}, {page.with_suffix('.md').name} and {page.with_suffix('.csv').name}")
