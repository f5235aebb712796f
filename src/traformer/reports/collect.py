"""From run folders to what a report compares: series of accuracy by length, one a method and task."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from traformer.errors import RunError
from traformer.evaluation.table import size
from traformer.methods import label_of
from traformer.runs.config import RunConfig, read_yaml
from traformer.runs.folder import RunFolder
from traformer.sweeps.cell import eval_command, train_command

Row = dict[str, Any]
TASK_DISPLAY = {"flip_flop": "Flip-flop", "copy": "Copy", "induction": "Induction", "instructions": "Instructions"}


@dataclass(frozen=True)
class Run:
    """What a report needs of a run folder."""

    name: str
    path: Path
    config: RunConfig
    rows: list[Row]  # of the newest step that was measured
    metrics: list[Row]
    records: dict[str, Any]  # versions and environment

    @property
    def train_length(self) -> int:
        return self.rows[0]["train_length"]

    def commands(self) -> list[str]:
        """What to type to make these rows again."""
        ways: dict[tuple[tuple[str, ...], int], dict[str, None]] = {}
        for row in self.rows:
            way = _text_flags(row, self.config) if "protocol" in row else ()
            ways.setdefault((way, row["examples"]), {})[str(row["length"])] = None
        evaluations = [
            shlex.join([*shlex.split(eval_command(self.path, ",".join(lengths), examples)), *flags])
            for (flags, examples), lengths in ways.items()
        ]
        return [train_command(self.config, self.path), *evaluations]


def _text_flags(row: Row, config: RunConfig) -> tuple[str, ...]:
    """Flags of `tra eval` by which a row of a text run differs from the usual."""
    protocol = row["protocol"]
    places = config.task_options.get("data", ())
    own = ", ".join([places] if isinstance(places, str) else places)
    flags: list[str] = []
    if protocol["data"] != own:
        flags += ["--data", protocol["data"]]
    split = protocol["split"].split(" ")[0]
    if split != "validation" and not (split == "all" and flags):
        flags += ["--split", split]
    if protocol["stride"] != protocol["window"] - 1:
        flags += ["--stride", str(protocol["stride"])]
    return tuple(flags)


@dataclass(frozen=True)
class Point:
    """One length of a series."""

    length: int | str
    size: int
    value: float
    low: float
    high: float
    examples: int
    seeds: int
    chance: float | None


@dataclass(frozen=True)
class Series:
    """Runs that differ in nothing but the seed, at one split."""

    label: str
    attention: str
    points: list[Point]


@dataclass
class Panel:
    """One plot: a task and a split, all methods."""

    task: str
    split: str
    train_length: int
    series: list[Series] = field(default_factory=list)


def collect(paths: Iterable[str | Path]) -> list[Run]:
    """All measured runs in the folders, each of which is a run or holds runs."""
    runs = []
    folders = [Path(path) for path in paths]
    for path in folders:
        if not path.is_dir():
            raise RunError(f"there is no folder {path} to report on")
        configs = [path / "config.yaml"] if (path / "config.yaml").exists() else sorted(path.rglob("config.yaml"))
        for config in configs:
            folder = RunFolder(config.parent)
            rows = folder.read_results()
            if rows:
                runs.append(_run(folder, path, rows))
    if not runs:
        raise RunError(f"no measured run in {', '.join(map(str, folders))}; measure with `tra eval RUN` first")
    return runs


def _run(folder: RunFolder, root: Path, rows: list[Row]) -> Run:
    newest = max(row["step"] for row in rows)
    values = read_yaml(folder.config_file)
    name = folder.path.name if folder.path == root else str(folder.path.relative_to(root))
    return Run(
        name=name,
        path=folder.path,
        config=RunConfig.from_dict(values, str(folder.config_file)),
        rows=[row for row in rows if row["step"] == newest],
        metrics=folder.read_metrics(),
        records={key: values.get(key) or {} for key in ("versions", "environment")},
    )


def panels(runs: Sequence[Run], metric: str = "exact_match") -> list[Panel]:
    """Plots in the order in which tasks and splits first occur; sub-splits (one an instruction) have none."""
    labels = series_labels(runs)
    found: dict[tuple[str, str, int], dict[str, list[tuple[Run, Row]]]] = {}
    for run in runs:
        for row in run.rows:
            if row["metric"] == metric and "/" not in row["split"]:
                key = (row["task"], row["split"], row["train_length"])
                found.setdefault(key, {}).setdefault(labels[run.path], []).append((run, row))
    result = []
    for (task, split, train_length), by_label in found.items():
        panel = Panel(task, split, train_length)
        for label, pairs in by_label.items():
            panel.series.append(Series(label, pairs[0][0].config.attention, _points([row for _, row in pairs])))
        panel.series.sort(key=lambda series: series.attention != "tra")
        result.append(panel)
    return result


def _points(rows: list[Row]) -> list[Point]:
    by_length: dict[Any, list[Row]] = {}
    for row in rows:
        by_length.setdefault(row["length"], []).append(row)
    points = []
    for length, same in by_length.items():
        values = [row["value"] for row in same]
        # One seed: the interval of its examples. Several: from the worst to the best of them.
        low, high = (same[0]["low"], same[0]["high"]) if len(same) == 1 else (min(values), max(values))
        points.append(
            Point(length, size(same[0]), sum(values) / len(values), low, high, same[0]["examples"], len(same),
                  same[0].get("chance"))
        )  # fmt: skip
    return sorted(points, key=lambda point: point.size)


# Settings that never tell two methods of a comparison apart.
_NOT_IN_LABELS = {
    "task", "task_options", "attention", "seed", "log_every", "save_every", "keep", "threads", "device", "tensorboard",
    "accumulate",
}  # fmt: skip


def series_labels(runs: Sequence[Run]) -> dict[Path, str]:
    """The attention's name, and those settings in which runs of the same task and attention differ."""
    flat = {run.path: _flatten(run.config) for run in runs}
    labels = {}
    for run in runs:
        peers = [
            flat[other.path]
            for other in runs
            if (other.config.task, other.config.attention) == (run.config.task, run.config.attention)
        ]
        differing = [name for name in sorted(set().union(*peers)) if len({repr(peer.get(name)) for peer in peers}) > 1]
        details = ", ".join(f"{name.rpartition('.')[2]} {flat[run.path].get(name, 'default')}" for name in differing)
        labels[run.path] = label_of(run.config.attention) + (f" ({details})" if details else "")
    return labels


def _flatten(config: RunConfig) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in config.to_dict().items():
        if name in _NOT_IN_LABELS:
            continue
        if isinstance(value, dict):
            flat.update({f"{name}.{key}": item for key, item in value.items()})
        else:
            flat[name] = value
    return flat


def display_task(task: str) -> str:
    return TASK_DISPLAY.get(task, task.replace("_", " "))


def display_split(split: str) -> str:
    return {"iid": "IID", "test": ""}.get(split, split)


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
