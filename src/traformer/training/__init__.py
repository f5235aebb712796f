"""The run: its config, its folder, its checkpoints and the loop. `train(RunConfig(...), folder)` is all of it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# Looked up on first use, so that reading a config does not load torch.
_LAZY = {
    "RunConfig": "traformer.runs.config",
    "RunFolder": "traformer.runs.folder",
    "build_model": "traformer.models.from_run",
    "build_task": "traformer.tasks",
    "load_run": "traformer.models.from_run",
    "train": "traformer.training.loop",
}

__all__ = list(_LAZY)

if TYPE_CHECKING:
    from traformer.models.from_run import build_model, load_run  # noqa: F401
    from traformer.runs.config import RunConfig  # noqa: F401
    from traformer.runs.folder import RunFolder  # noqa: F401
    from traformer.tasks import build_task  # noqa: F401
    from traformer.training.loop import train  # noqa: F401


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'traformer.training' has no attribute {name!r}")
