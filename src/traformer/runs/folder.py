"""A run folder: config.yaml, metrics.jsonl, checkpoints/, results.json, and the lock that keeps a second writer out."""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import yaml

from traformer.errors import RunError
from traformer.runs.checkpoint import Checkpoint, all_checkpoints, latest_good
from traformer.runs.config import RunConfig
from traformer.runs.measurements import ResultStore
from traformer.storage import Locked, lock, make_folder, write_atomically
from traformer.terminal import warn
from traformer.types import JsonObject, Options


class RunFolder:
    """Paths and small files of one run. Tensors are `checkpoint`'s business."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config_file = self.path / "config.yaml"
        self.metrics_file = self.path / "metrics.jsonl"
        self.diverged_file = self.path / "diverged.txt"  # why training cannot finish: its loss left the finite numbers
        self.checkpoints = self.path / "checkpoints"

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """A folder that holds a run, or a sentence."""
        folder = cls(path)
        if not folder.path.exists():
            raise RunError(f"there is no run folder {path}")
        if not folder.config_file.exists():
            saved = (folder.path / "config.json").exists()
            hint = "; it is a saved model, which `tra train --from` makes a run of" if saved else ""
            raise RunError(f"{path} is not a run folder: it has no config.yaml{hint}")
        return folder

    def step_to_use(self, step: int | None = None) -> int:
        """The newest checkpoint's step, or `step` if there is such a checkpoint; RunError otherwise."""
        there = [found.step for found in all_checkpoints(self.checkpoints)]
        if not there:
            raise RunError(f"{self.path} has no checkpoint yet; train it first")
        if step is not None and step not in there:
            raise RunError(f"{self.path} has no checkpoint of step {step}; it has: {', '.join(map(str, there))}")
        return there[-1] if step is None else step

    def find_checkpoint(self, step: int | None = None, warn: Callable[[str], None] = warn) -> Checkpoint:
        """The newest whole checkpoint, or exactly the step asked for; damaged ones that are passed over are named."""
        wanted = self.step_to_use(step)
        if step is None:
            good = latest_good(self.checkpoints, warn)
            if good is None:
                raise RunError(f"{self.path} has no undamaged checkpoint; resume its training")
            return good
        found = next(found for found in all_checkpoints(self.checkpoints) if found.step == wanted)
        if fault := found.fault():
            raise RunError(f"checkpoint {found.path} is damaged ({fault}); choose another --step")
        return found

    def is_run(self) -> bool:
        return self.config_file.exists()

    def is_free(self) -> bool:
        """Nothing there, or only what a start that was killed at once leaves behind."""
        return not self.path.exists() or (
            self.path.is_dir()
            and all(entry.name == ".lock" or entry.match("config.yaml*.writing") for entry in self.path.iterdir())
        )

    def clear(self) -> None:
        """Delete the run (for --overwrite), but for the lock, which we may hold. Only a run folder is ever deleted."""
        if not self.is_run():
            raise RunError(f"{self.path} is not a run folder, so it is not overwritten; choose another --out")
        # config.yaml goes last: until then a killed deletion can still be recognised and repeated.
        for entry in sorted(self.path.iterdir(), key=lambda entry: entry.name == "config.yaml"):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry.name != ".lock":
                entry.unlink()

    def read_config(self) -> RunConfig:
        return RunConfig.from_file(self.config_file)

    def write_config(self, config: RunConfig, environment: Options) -> None:
        make_folder(self.path)
        values = {**config.to_dict(), "versions": versions(), "environment": dict(environment)}
        write_atomically(self.config_file, yaml.safe_dump(values, sort_keys=False))

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder for this process; the system releases it however the process ends, kill -9 included."""
        make_folder(self.path)
        with ExitStack() as stack:
            try:
                stack.enter_context(lock(self.path / ".lock"))
            except Locked as held:
                raise RunError(
                    f"{self.path} is in use by {held.holder}; wait for it, or stop it, or choose another folder"
                ) from None
            yield

    # metrics.jsonl: one line per log step; `clock` holds what differs from one execution to the next

    def read_metrics(self) -> list[JsonObject]:
        """All whole lines. A last line that a kill tore, and damaged ones, are left out: a log never blocks a run."""
        return [row for row in map(_metrics_row, self._metrics_lines()) if row is not None]

    def cut_metrics(self, step: int, warn: Callable[[str], None] = warn) -> list[JsonObject]:
        """Drop the lines after `step`, which a resumed run will write again; a damaged file is kept beside it."""
        lines = self._metrics_lines()
        damaged = sum(_metrics_row(line) is None for line in lines[:-1])  # a torn last line is what a kill leaves
        if damaged:
            aside = self.metrics_file.with_name("metrics.damaged.jsonl")
            shutil.copyfile(self.metrics_file, aside)
            warn(f"{self.metrics_file} has {damaged} damaged lines; they are left out, and {aside.name} keeps the file")
        rows = [row for row in self.read_metrics() if row["step"] <= step]
        if self.metrics_file.exists():
            write_atomically(self.metrics_file, "".join(json.dumps(row) + "\n" for row in rows))
        return rows

    def _metrics_lines(self) -> list[str]:
        try:
            return self.metrics_file.read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return []

    @property
    def results(self) -> ResultStore:
        """What was measured of the run."""
        return ResultStore(self.path)


def _metrics_row(line: str) -> JsonObject | None:
    """A line of metrics.jsonl, or None if it is not one."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    numbers = isinstance(row, dict) and all(type(row.get(name)) in (int, float) for name in ("step", "loss"))
    return row if numbers else None


def versions() -> dict[str, str]:
    """Versions of what a number may depend on."""
    found = {"python": platform.python_version()}
    for package in ("traformer", "torch", "transformers", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed as a package"
    return found
