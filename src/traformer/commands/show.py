"""`tra show TASK`: examples as text, with the scored tokens marked."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from traformer.commands.arguments import add_json, key_value, options_once, positive_int, print_json
from traformer.errors import InputError
from traformer.terminal import say
from traformer.types import JsonObject

if TYPE_CHECKING:
    from traformer.tasks import Batch, Task


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("task", help="a task's name (see `tra list tasks`)")
    parser.add_argument("--length", type=positive_int, help="longest length, in the task's own unit")
    parser.add_argument(
        "--task-option",
        type=key_value,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the task; `tra list --options TASK` has them; repeatable",
    )
    parser.add_argument("--examples", type=positive_int, default=3, help="how many (default 3)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the examples (default 0)")
    parser.add_argument("--start", type=int, default=0, help="index of the first example (default 0)")
    add_json(parser)


def main(args: argparse.Namespace) -> None:
    from rich.console import Console

    from traformer.tasks import build_task, length_setting, task_class

    options = options_once("--task-option", args.task_option)
    if args.length is not None:
        name = length_setting(args.task)
        if name in options:
            raise InputError(f"--length and --task-option {name} set the same; give one of them")
        options[name] = args.length
    if notice := task_class(args.task).notice(options):
        say(notice)
    task = build_task(args.task, options)
    batch = task.examples(seed=args.seed, start=args.start, count=args.examples)
    if args.json:
        print_json([example_row(task, batch, row, args.start + row) for row in range(len(batch))])
        return
    console = Console(highlight=False, soft_wrap=True)
    how = "in green" if console.is_terminal else "in [brackets]"
    print(f"{task.name}: {task.vocab_size} token ids, at most {task.sequence_length} tokens; answers are {how}")
    for row in range(len(batch)):
        line = task.format(batch, row, markup=console.is_terminal)
        console.print(f"{args.start + row}: {line}", markup=console.is_terminal)


def example_row(task: Task, batch: Batch, row: int, index: int) -> JsonObject:
    """An example as JSON: its text, its ids, and the places of the answers among them."""
    size = int(batch.lengths[row])
    return {
        "index": index,
        "text": task.format(batch, row),
        "input_ids": batch.input_ids[row, :size].tolist(),
        "answers": batch.answers[row, :size].nonzero()[:, 0].tolist(),
    }
