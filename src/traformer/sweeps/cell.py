"""One cell of a sweep: a run to train and the lengths to measure it at. `run_cell` does what is not yet done of it.

As a program, `python -m traformer.sweeps.cell SPEC FOLDER`, it is the process that a sweep starts for a cell.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from traformer.errors import Diverged, InputError, RunError, TraformerError
from traformer.runs import checkpoint as checkpoints
from traformer.runs.config import RunConfig, flag_of
from traformer.runs.folder import RunFolder
from traformer.runs.measurements import Measurement, reading_name
from traformer.storage import write_atomically
from traformer.tasks import build_task
from traformer.types import JsonObject

Reading = tuple[str, str]  # split and length
RESERVED = ("cells", "logs")  # folders of the sweep itself


@dataclass(frozen=True)
class Cell:
    """A run, and how it is measured. The name is its folder's name in the sweep."""

    name: str
    config: RunConfig
    lengths: str | None = None  # as `tra eval --lengths` takes them; None: the task's own
    examples: int = 256
    stride: int | None = None  # of text: the trained window is also read in windows that move on by this
    frame: int | None = None  # of text: see `tra eval --frame`

    def to_dict(self) -> JsonObject:
        return {"name": self.name, "config": self.config.to_dict(), **self.measured()}

    def measured(self) -> JsonObject:
        """How it is measured; without what is not set, as in files from before it could be."""
        more = {name: value for name in ("stride", "frame") if (value := getattr(self, name)) is not None}
        return {"lengths": self.lengths, "examples": self.examples, **more}

    @classmethod
    def from_dict(cls, values: JsonObject) -> Cell:
        config = RunConfig.from_dict(values["config"], f"cell {values['name']}")
        return cls(
            values["name"], config, values["lengths"], values["examples"], values.get("stride"), values.get("frame")
        )

    @property
    def trained_window(self) -> str:
        return str(self.config.task_options["length"])

    def commands(self, folder: str | Path) -> list[str]:
        """What a person types to make the same numbers by hand."""
        frame = "" if self.frame is None else f" --frame {self.frame}"
        commands = [train_command(self.config, folder), eval_command(folder, self.lengths, self.examples) + frame]
        if self.stride is not None:
            reading = f"{eval_command(folder, self.trained_window, self.examples)} --stride {self.stride}"
            commands.append(reading + frame)
        return commands


def check_names(cells: Sequence[Cell]) -> None:
    """Refuse names that are no folders of their own below the sweep's: "../x", "/x", "a" twice, "a" and "a/b"."""
    taken: set[tuple[str, ...]] = set()
    for cell in cells:
        parts = PurePosixPath(cell.name).parts if isinstance(cell.name, str) else ()
        if not parts or "/".join(parts) != cell.name or ".." in parts or parts[0] in ("/", *RESERVED):
            raise InputError(
                f"a cell of the sweep is named {cell.name!r}; give the name of a folder below the sweep's, "
                f"such as tra-seed0, other than {' and '.join(RESERVED)}"
            )
        if parts in taken:
            raise InputError(f"two cells of the sweep are named {cell.name!r}; give each its own name")
        taken.add(parts)
    for parts in taken:
        for end in range(1, len(parts)):
            if parts[:end] in taken:
                raise InputError(
                    f"cell {'/'.join(parts)!r} is in the folder of cell {'/'.join(parts[:end])!r}; rename one"
                )


def config_to_resume(cell: Cell, folder: RunFolder) -> RunConfig:
    """The folder's own config with the cell's changeable settings; RunError if it was made with other settings."""
    try:
        return folder.read_config().for_resume(cell.config.to_dict(), folder.path)
    except RunError as error:
        raise RunError(f"{error}; or delete {folder.path} to let the sweep make it again") from None


def is_trained(cell: Cell, folder: RunFolder) -> bool:
    newest = checkpoints.latest_good(folder.checkpoints, warn=lambda text: None) if folder.is_run() else None
    return newest is not None and newest.step == cell.config.steps


def is_made_for(cell: Cell, folder: RunFolder) -> bool:
    """A run with the cell's settings, finished or not."""
    if not folder.is_run():
        return False
    try:
        config_to_resume(cell, folder)
    except TraformerError:
        return False  # `run_cell` says why
    return True


def is_done(cell: Cell, folder: RunFolder) -> bool:
    """Made with the cell's settings, and measured at every split and length at the end of its training.

    The weights need no longer be there.
    """
    return is_made_for(cell, folder) and not not_measured(cell, folder)


def not_measured(cell: Cell, folder: RunFolder) -> list[Reading]:
    """What the cell asks for and its folder does not hold."""
    rows = [
        one
        for one in folder.results.read()
        if (one.study, one.step, one.examples) == ("eval", cell.config.steps, cell.examples)
    ]
    splits = build_task(cell.config.task, cell.config.task_options).test_splits(cell.lengths)
    if cell.lengths is None:  # of a text's own lengths those are measured that the text reaches
        reach = min((one.protocol["tokens_in_text"] for one in rows if "tokens_in_text" in one.protocol), default=None)
        splits = [split for split in splits if reach is None or split.size <= reach]
    wanted = [(reading_name(split.name, None, cell.frame), split.length) for split in splits]
    if cell.stride is not None:
        names = {split.name for split in splits}
        wanted += [(reading_name(name, cell.stride, cell.frame), cell.trained_window) for name in names]
    measured = {(one.split, str(one.length)) for one in rows}
    return [one for one in wanted if one not in measured]


def run_cell(cell: Cell, path: str | Path, quiet: bool = False) -> list[Measurement]:
    """Train (or resume), measure (or resume), and return what was measured."""
    from traformer.devices import set_threads
    from traformer.evaluation.evaluate import evaluate_run
    from traformer.training.loop import train

    folder = RunFolder(path)
    resume = folder.is_run()
    config = config_to_resume(cell, folder) if resume else cell.config
    if not resume or not is_trained(cell, folder):
        try:
            train(config, path, resume=resume, quiet=quiet)
        except Diverged as error:
            write_atomically(folder.diverged_file, f"{error}\n")
            raise
    set_threads(cell.config.threads)
    device, frame = cell.config.device, cell.frame
    found = evaluate_run(path, cell.lengths, cell.examples, device=device, frame=frame)
    if cell.stride is not None:
        window = cell.trained_window
        found += evaluate_run(path, window, cell.examples, device=device, stride=cell.stride, frame=frame)
    return found


def train_command(config: RunConfig, folder: str | Path) -> str:
    """The `tra train` command that makes this run; only what differs from the defaults is spelt out."""
    default = RunConfig()
    parts = ["tra", "train"]
    flags = {item.name: flag_of(item) for item in dataclasses.fields(config)}
    for name, value in config.to_dict().items():
        flag = flags[name]
        if name in ("task_options", "attention_options", "model_options"):
            for option, setting in value.items():
                parts += [flag, f"{option}={json.dumps(setting) if not isinstance(setting, str) else setting}"]
        elif name in ("task", "attention", "preset", "steps", "lr", "seed") or value != getattr(default, name):
            parts += [flag] if value is True else [flag, str(value)]
    return shlex.join([*parts, "--out", str(folder)])


def eval_command(folder: str | Path, lengths: str | None, examples: int) -> str:
    parts = ["tra", "eval", str(folder)]
    if lengths is not None:
        parts += ["--lengths", lengths]
    return shlex.join([*parts, "--examples", str(examples)])


def die_with_parent() -> None:
    """Ask Linux to send this process SIGTERM (save and stop) when its parent is gone, however that ended."""
    if not sys.platform.startswith("linux"):
        return
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGTERM)
    if os.getppid() == 1:  # the parent went before the request was made
        os.kill(os.getpid(), signal.SIGTERM)


def main(argv: list[str]) -> int:
    """SPEC is a JSON file of `Cell.to_dict`."""
    spec, folder = argv
    die_with_parent()
    try:
        run_cell(Cell.from_dict(json.loads(Path(spec).read_text(encoding="utf-8"))), folder)
    except TraformerError as error:
        print(f"tra: error: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
