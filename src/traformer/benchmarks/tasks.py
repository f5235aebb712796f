"""How fast the task generators make batches: tokens per second on one core, padding not counted."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

from traformer.errors import InputError, unknown_name
from traformer.storage import check_file
from traformer.types import JsonObject

# Label -> (task, settings); every one as it trains by default.
SETTINGS: dict[str, tuple[str, JsonObject]] = {
    "flip_flop": ("flip_flop", {}),
    "copy unique": ("copy", {"alphabet": "unique"}),
    "copy letters": ("copy", {"alphabet": "letters"}),
    "copy binary": ("copy", {"alphabet": "binary"}),
    "induction": ("induction", {}),
    "instructions": ("instructions", {}),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `tra bench tasks`."""
    parser.add_argument("--task", action="append", metavar="NAME", help="a task to measure (default: all)")
    parser.add_argument("--batch-size", type=int, default=64, metavar="N", help="examples a batch (default: 64)")
    parser.add_argument("--repeats", type=int, default=50, metavar="N", help="timed batches a task (default: 50)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")


def measure(label: str, batch_size: int, repeats: int) -> JsonObject:
    """Median over `repeats` batches, each another stretch of the stream, after two that do not count."""
    from traformer.tasks import build_task

    name, settings = SETTINGS[label]
    task = build_task(name, settings)
    rates = []
    for batch_number in range(-2, repeats):
        start = (batch_number + 2) * batch_size
        began = time.perf_counter()
        batch = task.examples(seed=0, start=start, count=batch_size)
        seconds = time.perf_counter() - began
        if batch_number >= 0:
            rates.append(int(batch.lengths.sum()) / seconds)
    return {
        "benchmark": "tasks",
        "task": label,
        "batch_size": batch_size,
        "batches": repeats,
        "tokens_per_second": statistics.median(rates),
        "slowest": min(rates),
        "fastest": max(rates),
    }


def main(args: argparse.Namespace) -> int:
    """Measure, print a table, and write the rows where asked."""
    for option in ("batch_size", "repeats"):
        if getattr(args, option) < 1:
            raise InputError(f"--{option.replace('_', '-')} {getattr(args, option)} is too small; give at least 1")
    wanted = args.task or list(SETTINGS)
    known = sorted({name for name, _ in SETTINGS.values()} | set(SETTINGS))
    for name in wanted:
        if name not in known:
            raise unknown_name("task", name, known)
    labels = [label for label, (name, _) in SETTINGS.items() if name in wanted or label in wanted]
    if args.json is not None:
        check_file(args.json)

    import torch
    from rich.console import Console
    from rich.table import Table

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = [measure(label, args.batch_size, args.repeats) for label in labels]
    finally:
        torch.set_num_threads(threads)
    table = Table(title=f"Generating batches of {args.batch_size}, one core, million tokens a second")
    for heading in ("task", "median", "slowest", "fastest"):
        table.add_column(heading, justify="left" if heading == "task" else "right")
    for row in rows:
        table.add_row(row["task"], *(f"{row[key] / 1e6:.1f}" for key in ("tokens_per_second", "slowest", "fastest")))
    Console().print(table)
    if args.json is not None:
        about = {"python": platform.python_version(), "machine": platform.machine(), "torch": torch.__version__}
        args.json.write_text(json.dumps({"about": about, "rows": rows}, indent=2) + "\n")
    return 0
