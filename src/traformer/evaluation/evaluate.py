"""`evaluate_run`: measure a run's model in the way its task asks for, into the run's store."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from traformer.errors import InputError
from traformer.evaluation import evaluator
from traformer.evaluation.opened import EvaluationOptions, OpenedRun
from traformer.evaluation.watcher import Watcher
from traformer.runs.measurements import Measurement


def evaluate_run(
    path: str | Path,
    lengths: str | Iterable[int | str] | None = None,
    examples: int = 256,
    *,
    seed: int | None = None,
    step: int | None = None,
    batch_tokens: int | None = None,
    device: str = "auto",
    count_overlap: bool | None = None,
    again: bool = False,
    watcher: Watcher | None = None,
    **evaluator_options: Any,
) -> list[Measurement]:
    """Measure a run's model; each split is stored as soon as it is done, so an interrupted evaluation continues.

    What was measured before with the same settings is not measured again unless `again` is set. Test examples come
    from the test stream of `seed`, by default the run's own. `count_overlap`: report how many test examples training
    has shown; None does so where that is quick. A text run is measured by perplexity; stride, frame, split and data are
    for it alone.
    """
    if examples < 1:
        raise InputError(f"examples is {examples}; give a whole number above zero")
    watcher = watcher or Watcher()
    run = OpenedRun.open(path, device, step, watcher)
    given = {name: value for name, value in evaluator_options.items() if value is not None}
    options = EvaluationOptions(lengths, examples, seed, batch_tokens, count_overlap, again, given)
    found: list[Measurement] = evaluator(run.task.evaluator)(run, options, watcher)
    return found
