"""The run: its config, its folder, its checkpoints and the loop. `train(RunConfig(...), folder)` is all of it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# Looked up on first use, so that reading a config does not load torch.
_LAZY = {
    "RunConfig": "traformer.training.config",
    "RunFolder": "traformer.training.run_folder",
    "build_model": "traformer.training.build",
    "build_task": "traformer.training.build",
    "load_run": "traformer.training.build",
    "train": "traformer.training.loop",
}

__all__ = list(_LAZY)

if TYPE_CHECKING:
    from traformer.training.build import build_model, build_task, load_run  # noqa: F401
    from traformer.training.config import RunConfig  # noqa: F401
    from traformer.training.loop import train  # noqa: F401
    from traformer.training.run_folder import RunFolder  # noqa: F401


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'traformer.training' has no attribute {name!r}")
