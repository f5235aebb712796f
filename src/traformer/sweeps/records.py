"""Finished cells as lines of one small file, so that a sweep can be continued elsewhere from what a project has kept.

A record holds a cell's settings, its training losses and everything measured of it, but no weights. That a cell's loss
diverged is recorded, too. `restore` lays such cells out as run folders, which the sweep then skips and the report
reads; `Recording` adds each cell as it is done.
A record counts only if its settings are those of the cell, apart from where text is found on a machine: a path says
nothing elsewhere and is left out, the name of a built-in text or of a tokenizer is not.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from traformer.errors import InputError
from traformer.runs.config import RunConfig, is_changeable
from traformer.runs.folder import RunFolder
from traformer.runs.measurements import Measurement
from traformer.storage import changing, check_file, make_folder, write_atomically
from traformer.sweeps.cell import Cell, is_done
from traformer.sweeps.local import CellState, SweepView
from traformer.types import JsonObject

Record = JsonObject  # a line of the file, as JSON
PLACES = ("data", "tokenizer")  # task options that may be paths of one machine
FIELDS = {"name": str, "settings": dict, "losses": list, "shared": dict, "results": list}
DIGITS = 7  # of a number in a record


def settings_of(cell: Cell) -> JsonObject:
    """What a cell's numbers depend on and what means the same on every machine: its settings that are no defaults."""
    usual = RunConfig().to_dict()
    values = {name: value for name, value in cell.config.to_dict().items() if value != usual[name]}
    options = cell.config.task_options
    values["task_options"] = {name: value for name, value in options.items() if not _is_place(name, value)}
    return {"config": values, **cell.measured()}


def _decisive(settings: JsonObject) -> JsonObject:
    """Settings as JSON holds them, without those of the config that do not change what is computed."""
    config = {name: value for name, value in settings["config"].items() if not is_changeable(name)}
    decisive: JsonObject = json.loads(json.dumps({**settings, "config": config}))
    return decisive


def _is_place(name: str, value: object) -> bool:
    """Whether an option is where text or a tokenizer lies on this machine."""
    each = value if isinstance(value, (list, tuple)) else [value]
    return name in PLACES and any(
        isinstance(one, str) and (Path(one).is_absolute() or Path(one).exists()) for one in each
    )


def record_of(cell: Cell, folder: RunFolder) -> Record:
    """A finished or diverged cell, with the settings that its folder was made with.

    Fields that all measurements share are written once.
    """
    rows = [one.to_row() for one in folder.results.read()]
    for row in rows:
        row.pop("protocol", None)
    first = rows[0] if rows else {}
    shared = {name: value for name, value in first.items() if all(row.get(name) == value for row in rows)}
    own = [{name: _short(value) for name, value in row.items() if name not in shared} for row in rows]
    losses = [[row["step"], _short(float(row["loss"]))] for row in folder.read_metrics()]
    made = dataclasses.replace(cell, config=folder.read_config())
    record = {"name": cell.name, "settings": settings_of(made), "losses": losses, "shared": shared, "results": own}
    if folder.diverged_file.exists():
        record["diverged"] = folder.diverged_file.read_text(encoding="utf-8")
    return record


def read_records(file: str | Path) -> dict[str, Record]:
    """By the cells' names; none if there is no file."""
    file = Path(file)
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}; give another --records") from None
    found: dict[str, Record] = {}
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            if not _is_record(record):
                raise ValueError
        except (ValueError, RecursionError):
            raise InputError(
                f"line {number} of {file} is no record of a finished cell; give another --records, or delete the line"
            ) from None
        found[record["name"]] = record
    return found


def _is_record(found: object) -> bool:
    """Whether JSON has the form of a record; a ValueError where a measurement has not."""
    if not isinstance(found, dict) or not all(isinstance(found.get(name), kind) for name, kind in FIELDS.items()):
        return False
    for row in found["results"]:
        if not isinstance(row, dict):
            return False
        Measurement.from_row({**found["shared"], **row})
    losses_are_pairs = all(
        isinstance(pair, list) and [type(one) in (int, float) for one in pair] == [True, True]
        for pair in found["losses"]
    )
    return (
        losses_are_pairs
        and isinstance(found["settings"].get("config"), dict)
        and isinstance(found.get("diverged", ""), str)
    )


def restore(cells: Sequence[Cell], records: Mapping[str, Record], out: str | Path) -> list[str]:
    """Make run folders, without weights, of the cells that are recorded and not in `out` yet; returns their names."""
    restored = []
    for cell in cells:
        record = records.get(cell.name)
        folder = RunFolder(Path(out) / cell.name)
        if record is None or folder.is_run() or _decisive(record["settings"]) != _decisive(settings_of(cell)):
            continue
        make_folder(folder.path)
        lines = [json.dumps({"step": step, "loss": loss}) for step, loss in record["losses"]]
        write_atomically(folder.metrics_file, "".join(line + "\n" for line in lines))
        folder.results.write(Measurement.from_row({**record["shared"], **row}) for row in record["results"])
        if "diverged" in record:
            write_atomically(folder.diverged_file, record["diverged"])
        # Last, since it makes a run of the folder: one that is restored in part is restored again.
        folder.write_config(cell.config, {"restored": "from a record of finished cells; its weights were not kept"})
        restored.append(cell.name)
    return restored


class Recording(SweepView):
    """Passes on what happens to `view`, and adds every cell that is done, or whose loss diverged, to the file."""

    def __init__(self, file: str | Path, view: SweepView) -> None:
        self.file, self.view = Path(file), view
        make_folder(self.file.parent, "give another --records")
        check_file(self.file)
        self.records = dict(read_records(self.file))

    def changed(self, state: CellState) -> None:
        self.view.changed(state)
        is_finished = state.status in ("done", "skipped") and is_done(state.cell, state.folder)
        if is_finished or (state.status == "failed" and state.folder.diverged_file.exists()):
            self.add(record_of(state.cell, state.folder))

    def tick(self, states: Sequence[CellState]) -> None:
        self.view.tick(states)

    def add(self, record: Record) -> None:
        if self.records.get(record["name"]) == json.loads(json.dumps(record)):
            return
        with changing(self.file):
            self.records = {**read_records(self.file), record["name"]: record}  # other sweeps add theirs, too
            lines = [json.dumps(self.records[name], separators=(",", ":")) for name in sorted(self.records)]
            write_atomically(self.file, "".join(line + "\n" for line in lines))


def _short(value: object) -> object:
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
