"""`tra report DIR...`: a page, a Markdown file and a CSV from measured runs."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", nargs="+", metavar="DIR", help="run folders, or folders that hold run folders")
    parser.add_argument("--out", metavar="DIR", help="where report.html, .md and .csv go (default: the first DIR)")
    parser.add_argument("--title", help="the page's title")


def main(args: argparse.Namespace) -> None:
    from pathlib import Path

    from rich.console import Console

    from traformer.reports.collect import collect
    from traformer.reports.terminal import comparison_table
    from traformer.reports.write import write_report

    runs = collect(args.folders)
    out = Path(args.out or args.folders[0])
    out.mkdir(parents=True, exist_ok=True)
    page = write_report(runs, out, args.title)
    console = Console(width=None if Console().is_terminal else 140, highlight=False)
    for table in comparison_table(runs):
        console.print(table)
    print(f"written: {page}, {page.with_suffix('.md').name} and {page.with_suffix('.csv').name}")
