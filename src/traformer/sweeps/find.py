"""From what a person calls an experiment to its cells."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

from traformer.errors import InputError, unknown_name
from traformer.experiments import EXPERIMENTS
from traformer.sweeps.cell import Cell


def find_experiment(name: str) -> ModuleType:
    """A known experiment, a Python file, or an importable module; it has `cells() -> list[Cell]`."""
    if name in EXPERIMENTS:
        module = importlib.import_module(f"traformer.experiments.{name}")
    elif name.endswith(".py"):
        if not Path(name).is_file():
            raise InputError(f"there is no experiment file {name}")
        spec = importlib.util.spec_from_file_location(Path(name).stem, name)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    elif "." in name:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            raise InputError(f"there is no module {name} to take an experiment from") from None
    else:
        raise unknown_name("experiment", name, EXPERIMENTS)
    if not callable(getattr(module, "cells", None)):
        raise InputError(f"experiment {name} has no function cells() that returns a list of Cell")
    return module


def experiment_cells(module: ModuleType) -> list[Cell]:
    cells = list(module.cells())
    if not cells or not all(isinstance(cell, Cell) for cell in cells):
        raise InputError(f"cells() of experiment {module.__name__} must return a list of Cell with at least one in it")
    return cells
