"""From what a person calls an experiment to its cells."""

from __future__ import annotations

import importlib
import importlib.util
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from traformer.errors import InputError, TraformerError, unknown_name
from traformer.experiments import EXPERIMENTS
from traformer.sweeps.cell import Cell, check_names


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
        with _its_own_errors(name):
            spec.loader.exec_module(module)
    elif "." in name.strip("."):
        try:
            with _its_own_errors(name):
                module = importlib.import_module(name)
        except ModuleNotFoundError:
            raise InputError(f"there is no module {name} to take an experiment from") from None
    else:
        raise unknown_name("experiment", name, EXPERIMENTS)
    if not callable(getattr(module, "cells", None)):
        raise InputError(f"experiment {name} has no function cells() that returns a list of Cell")
    return module


def experiment_cells(module: ModuleType) -> list[Cell]:
    """The cells of an experiment, with names that can be folders side by side."""
    name = module.__name__
    with _its_own_errors(getattr(module, "__file__", None) or name):
        cells = module.cells()
        cells = list(cells) if isinstance(cells, Iterable) else cells
    if not isinstance(cells, list) or not cells or not all(isinstance(cell, Cell) for cell in cells):
        raise InputError(f"cells() of experiment {name} must return a list of Cell with at least one in it")
    check_names(cells)
    return cells


@contextmanager
def _its_own_errors(name: str) -> Iterator[None]:
    """An exception of the user's own code as one sentence that names the line."""
    try:
        yield
    except TraformerError:
        raise
    except SystemExit as stopped:
        raise InputError(f"the experiment {name} called sys.exit({stopped.code!r}) as it was read") from None
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name and name.startswith(error.name):
            raise  # the module that was asked for, not one that it imports
        if isinstance(error, SyntaxError):
            line, message = error.lineno, error.msg
        else:
            frames = traceback.extract_tb(error.__traceback__)
            own = [frame.lineno for frame in frames if Path(frame.filename).name == Path(name).name]
            line, message = (own[-1] if own else None), str(error)
        raise InputError(
            f"the experiment {name} failed{f' in line {line}' if line else ''}: {type(error).__name__}: {message}"
        ) from error
