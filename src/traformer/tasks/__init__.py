"""What a model is asked to do: generators of examples, their vocabularies, test splits and metrics.

Importing this package does not load torch; only drawing a batch does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from traformer.errors import InputError, unknown_name
from traformer.tasks.base import Batch, Split, Task, parse_lengths
from traformer.tasks.copy import Copy
from traformer.tasks.flip_flop import FlipFlop
from traformer.tasks.induction import Induction
from traformer.tasks.instructions import Instructions
from traformer.tasks.overlaps import Overlap, overlap
from traformer.tasks.text import Text

TASKS: dict[str, type[Task]] = {task.name: task for task in (FlipFlop, Copy, Induction, Instructions, Text)}

__all__ = [
    "TASKS",
    "Batch",
    "Copy",
    "FlipFlop",
    "Induction",
    "Instructions",
    "Overlap",
    "Split",
    "Task",
    "Text",
    "make_task",
    "overlap",
    "parse_lengths",
    "task_from_config",
]


def make_task(name: str, length: int | None = None, **settings: Any) -> Task:
    """A task by name; `length` is the longest training length in the task's own unit."""
    if name not in TASKS:
        raise unknown_name("task", name, TASKS)
    if length is not None:
        setting = TASKS[name].length_setting
        if setting in settings:
            raise InputError(f"length and {setting} are the same setting of {name}; give one of them")
        settings[setting] = length
    return TASKS[name].from_config(settings)


def task_from_config(config: Mapping[str, Any]) -> Task:
    """The task of a run's config, as written by `Task.to_config`."""
    if "name" not in config:
        raise InputError("the task's config has no 'name'; it must name one of the tasks " + ", ".join(TASKS))
    if config["name"] not in TASKS:
        raise unknown_name("task", config["name"], TASKS)
    return TASKS[config["name"]].from_config(config)
