"""An experiment's hypotheses, judged on what its folder holds: its module may have `verdicts(out) -> list[Verdict]`."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from traformer.errors import InputError
from traformer.experiments.protocol import Verdict
from traformer.sweeps.find import errors_of, find_experiment


def verdicts_of(experiment: str | ModuleType, out: str | Path) -> list[Verdict]:
    """What an experiment says of the runs in `out`: each hypothesis holds, does not hold, or is not decided.

    One that is asked for by name must have hypotheses; a module without any has no verdicts.
    """
    module = find_experiment(experiment) if isinstance(experiment, str) else experiment
    judge = getattr(module, "verdicts", None)
    if judge is None:
        if isinstance(experiment, str):
            raise InputError(f"{experiment} states no hypotheses: it has no function verdicts(out)")
        return []
    with errors_of(module):
        found = list(judge(Path(out)))
    for one in found:
        if not isinstance(one, Verdict):
            raise InputError(f"verdicts(out) of {module.__name__} must give Verdicts, not {type(one).__name__}")
    return found
