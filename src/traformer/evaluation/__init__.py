"""How accurate a trained model is: by length, by window, far beyond training, and why it fails."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from traformer.errors import unknown_name

__all__ = ["EVALUATORS", "evaluate_run", "evaluator"]

if TYPE_CHECKING:
    from traformer.evaluation.evaluate import evaluate_run
    from traformer.runs.measurements import Measurement

# What a task names as its evaluator -> the function that measures a run of it, as module:function.
EVALUATORS = {
    "answers": "traformer.evaluation.by_length:evaluate_answers",
    "perplexity": "traformer.evaluation.perplexity:evaluate_text",
}


def evaluator(name: str) -> Callable[..., list[Measurement]]:
    """The function of an evaluator's name; loads torch."""
    if name not in EVALUATORS:
        raise unknown_name("evaluator", name, EVALUATORS)
    module, _, function = EVALUATORS[name].partition(":")
    found: Callable[..., list[Measurement]] = getattr(import_module(module), function)
    return found


def __getattr__(name: str) -> Any:
    if name == "evaluate_run":
        from traformer.evaluation import evaluate

        return evaluate.evaluate_run
    raise AttributeError(f"module 'traformer.evaluation' has no attribute {name!r}")
