"""Short examples first: the longest training length grows over the first part of a run."""

from __future__ import annotations

from itertools import groupby

from traformer.errors import InputError
from traformer.tasks import Task
from traformer.tasks.overlaps import Shown


def check_curriculum(task: Task, share: float) -> None:
    """A task whose examples all have one length has nothing to grow."""
    shortest, longest = task.length_range
    if share and (task.evaluator != "answers" or shortest == longest):
        raise InputError(
            f"curriculum {share:g} needs training lengths that vary, and those of this {task.name} are all {longest}; "
            "leave it out, or give a smaller min_length if the task has one"
        )


def task_of_step(task: Task, step: int, steps: int, share: float) -> Task:
    """What step `step` (from 0) draws its examples from: within the first `share` of the steps, only the shorter ones.

    The longest length grows evenly from the shortest to the task's own, at which every later step is; where the task
    has no examples of a length, it is the next that it has.
    """
    shortest, longest = task.length_range
    growing = share * steps
    if step + 1 >= growing:
        return task
    grown = shortest + int((longest - shortest) * (step + 1) / growing)
    return task.at_length(shortest, task.possible_length(grown))


def examples_shown(task: Task, done: int, steps: int, share: float, batch_size: int) -> list[Shown]:
    """The examples of the first `done` of `steps` steps, steps that draw from one task together."""
    made = []
    for stage, stage_steps in groupby(range(done), lambda step: task_of_step(task, step, steps, share)):
        at = list(stage_steps)
        made.append(Shown(stage, range(at[0] * batch_size, (at[-1] + 1) * batch_size)))
    return made
