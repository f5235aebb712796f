"""`tra explore`: one HTML page that shows what each head looks at, keeps and removes."""

from __future__ import annotations

import argparse
from pathlib import Path

from traformer.commands.arguments import add_device, add_lengths, add_threads, joined, positive_int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="run folders of one task, or saved models with --prompt, shown side by side",
    )
    parser.add_argument("--prompt", help="show this text instead of an example of the task")
    parser.add_argument(
        "--task-example", type=int, default=0, metavar="N", help="number of the test example (default 0)"
    )
    add_lengths(parser)
    parser.add_argument("--split", help="the task's split, such as sparse for flip_flop (default: its first)")
    parser.add_argument("--step", type=int, help="step of the checkpoint (default: the newest)")
    add_device(parser)
    add_threads(parser)
    parser.add_argument(
        "--size",
        type=positive_int,
        default=4000,
        metavar="KB",
        help="approximate maximum size of the page (default 4000)",
    )
    parser.add_argument("--title", help="the page's title")
    parser.add_argument("--out", default="explore.html", metavar="PAGE", help="output file (default explore.html)")


def main(args: argparse.Namespace) -> None:
    from traformer.commands.watching import ShownWatcher
    from traformer.devices import set_threads
    from traformer.evaluation.explore import explore_runs
    from traformer.reports.explore import explore_page
    from traformer.storage import check_file

    set_threads(args.threads)
    check_file(Path(args.out))  # before the work
    with ShownWatcher() as watcher:
        exploration = explore_runs(
            args.runs,
            prompt=args.prompt,
            example=args.task_example,
            lengths=joined(args.lengths),
            split=args.split,
            title=args.title,
            device=args.device,
            step=args.step,
            most_bytes=1000 * args.size,
            watcher=watcher,
        )
    out = explore_page(exploration).save(args.out)
    print(f"open {out} in a browser")
