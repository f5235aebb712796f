"""How right a trained model is, by length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["evaluate_run"]

if TYPE_CHECKING:
    from traformer.evaluation.by_length import evaluate_run


def __getattr__(name: str) -> Any:
    if name in __all__:
        from traformer.evaluation import by_length

        return getattr(by_length, name)
    raise AttributeError(f"module 'traformer.evaluation' has no attribute {name!r}")
