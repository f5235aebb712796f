"""What training in parts of similar length saves: a step's time, forward and backward, over that of one padded batch.

The steps of all numbers of parts are interleaved in one process, on the same examples.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from traformer.benchmarks.attention import cpu_model
from traformer.benchmarks.train import interleaved
from traformer.commands.arguments import positive_int
from traformer.errors import unknown_name
from traformer.storage import check_file, write_atomically
from traformer.types import JsonObject

TABLES = ("copy", "induction", "instructions")  # of `tra reproduce`, at the scale laptop; their first part
DEFAULT_METHODS = ("tra_plus", "rope", "fot", "asentmax")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `tra bench lengths`."""
    parser.add_argument(
        "--tables", nargs="+", default=["copy", "instructions"], metavar="TABLE", help=", ".join(TABLES)
    )
    parser.add_argument("--attentions", nargs="+", default=list(DEFAULT_METHODS), metavar="NAME")
    parser.add_argument(
        "--parts", nargs="+", type=positive_int, default=[2, 4, 8], metavar="N", help="(default: 2 4 8)"
    )
    parser.add_argument("--rounds", type=positive_int, default=7, help="timed steps of each (default 7)")
    parser.add_argument("--threads", type=positive_int, help="threads of torch (default: its own choice)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")


def main(args: argparse.Namespace) -> int:
    """Measure, print a table, and write the rows where asked."""
    import torch

    from traformer.devices import flush_denormals, set_threads
    from traformer.terminal import new_table, stdout_console

    for name in args.tables:
        if name not in TABLES:
            raise unknown_name("table", name, TABLES)
    if args.json is not None:
        check_file(args.json)
    set_threads(args.threads)
    with flush_denormals():  # as training does
        rows = [
            measure(table, attention, args.parts, args.rounds) for table in args.tables for attention in args.attentions
        ]
    about = {"cpu": cpu_model(), "threads": torch.get_num_threads()}
    table = new_table(f"time of a training step in parts over one padded batch ({about['cpu']})")
    for heading in ("task", "attention", "one batch, ms", *(f"{n} parts" for n in args.parts)):
        table.add_column(heading, justify="right")
    for row in rows:
        ratios = (f"{row['ratios'][str(n)]:.2f}" for n in args.parts)
        table.add_row(row["task"], row["attention"], f"{1000 * row['seconds']:.0f}", *ratios)
    stdout_console(140).print(table)
    if args.json is not None:
        write_atomically(args.json, json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    return 0


def measure(table: str, attention: str, parts: Sequence[int], rounds: int) -> JsonObject:
    """Median seconds of a step with one padded batch, and the median ratio to it with so many parts."""
    from traformer.experiments.paper import parts_of
    from traformer.models.from_run import build_model
    from traformer.tasks import build_task
    from traformer.training.loss import AnswerLoss

    config = parts_of(table, "laptop")[0].config.replace(attention=attention)
    task = build_task(config.task, config.task_options)
    task.prepare()
    model = build_model(config, task).train()
    loss = AnswerLoss(model)
    batch = task.examples(seed=0, start=0, count=config.batch_size)
    answers = int(batch.answers.sum())

    def step(count: int) -> None:
        for part in [batch] if count == 1 else batch.by_length(count):
            (loss(part.input_ids, part.answers)[0] / answers).backward()
        model.zero_grad(set_to_none=True)

    steps = {str(count): partial(step, count) for count in (1, *parts)}
    for one in steps.values():  # warms up
        one()
    seconds = interleaved(steps, rounds)
    ratios = {
        name: statistics.median(mine / base for mine, base in zip(own, seconds["1"], strict=True))
        for name, own in seconds.items()
        if name != "1"
    }
    return {
        "benchmark": "lengths", "task": config.task, "attention": attention, "batch": config.batch_size,
        "seconds": statistics.median(seconds["1"]), "ratios": ratios, "rounds": rounds,
    }  # fmt: skip
