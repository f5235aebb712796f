"""From what a person calls an experiment to its cells."""

from __future__ import annotations

import importlib
import importlib.util
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType

from traformer.errors import InputError, TraformerError, unknown_name
from traformer.experiments import EXPERIMENTS
from traformer.sweeps.cell import Cell, check_names

# (out, names of failed cells) -> the cells that can run now
NextCells = Callable[[Path, list[str]], list[Cell]]


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
        with errors_of(name):
            spec.loader.exec_module(module)
    elif "." in name.strip("."):
        try:
            with errors_of(name):
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
    found = _cells_of(module, "cells", module.cells)
    if not found:
        raise InputError(f"cells() of experiment {module.__name__} must return a list of Cell with at least one in it")
    return found


def next_cells_of(module: ModuleType) -> NextCells | None:
    """The experiment's `next_cells`, with errors of its own as sentences; None if it has none."""
    ask = getattr(module, "next_cells", None)
    return None if ask is None else lambda out, failed: _cells_of(module, "next_cells", partial(ask, out, failed))


def _cells_of(module: ModuleType, name: str, ask: Callable[[], object]) -> list[Cell]:
    with errors_of(module):
        cells = ask()
        cells = list(cells) if isinstance(cells, Iterable) else cells
    if not isinstance(cells, list) or not all(isinstance(cell, Cell) for cell in cells):
        raise InputError(f"{name}() of experiment {module.__name__} must return a list of Cell")
    check_names(cells)
    return cells


@contextmanager
def errors_of(experiment: str | ModuleType) -> Iterator[None]:
    """An exception of the user's own code as one sentence that names the line."""
    name = experiment if isinstance(experiment, str) else getattr(experiment, "__file__", None) or experiment.__name__
    try:
        yield
    except TraformerError:
        raise
    except SystemExit as stopped:
        raise InputError(f"the experiment {name} called sys.exit({stopped.code!r})") from None
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
