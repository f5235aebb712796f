"""What a model is asked to do: generators of examples, their vocabularies, test splits and metrics.

Importing this package does not load torch; only drawing a batch does.
"""

from __future__ import annotations

from traformer.errors import unknown_name
from traformer.tasks.algorithmic import Algorithmic
from traformer.tasks.base import Batch, Split, Task
from traformer.tasks.copy import Copy
from traformer.tasks.flip_flop import FlipFlop
from traformer.tasks.induction import Induction
from traformer.tasks.instructions import Instructions
from traformer.tasks.lengths import parse_lengths
from traformer.tasks.overlaps import Overlap, Shown, overlap
from traformer.tasks.recall import Recall
from traformer.tasks.text import Text
from traformer.types import Options

TASKS: dict[str, type[Task]] = {
    task.name: task for task in (FlipFlop, Copy, Induction, Instructions, Recall, Algorithmic, Text)
}

__all__ = [
    "TASKS",
    "Algorithmic",
    "Batch",
    "Copy",
    "FlipFlop",
    "Induction",
    "Instructions",
    "Overlap",
    "Recall",
    "Shown",
    "Split",
    "Task",
    "Text",
    "build_task",
    "length_setting",
    "overlap",
    "parse_lengths",
    "task_class",
]


def task_class(name: str) -> type[Task]:
    """The class of a task by name."""
    if name not in TASKS:
        raise unknown_name("task", name, TASKS)
    return TASKS[name]


def length_setting(name: str) -> str:
    """The name of the task's option that `--length` sets."""
    return task_class(name).length_setting


def build_task(name: str, options: Options | None = None) -> Task:
    """A task by name, with its options as a run's config holds them."""
    return task_class(name).from_options(options or {})
