"""From folders to runs: what a report needs of each run folder."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from traformer.errors import RunError, TraformerError
from traformer.methods import label_of
from traformer.runs.config import RunConfig, read_yaml
from traformer.runs.folder import RunFolder
from traformer.runs.legacy import LEGACY_FILES, is_legacy, legacy_measurements
from traformer.runs.measurements import Measurement, with_others
from traformer.runs.metrics import metric_named
from traformer.sweeps.cell import eval_command, train_command
from traformer.tasks import TASKS, Task, build_task
from traformer.types import JsonObject, Options


@dataclass(frozen=True)
class TrainingLine:
    """One line of metrics.jsonl."""

    step: int
    loss: float
    accuracy: float | None
    tokens: int | None


@dataclass(frozen=True)
class Run:
    """What a report needs of a run folder."""

    name: str
    path: Path
    config: RunConfig
    measurements: list[Measurement]  # of the newest step that each study measured
    training: list[TrainingLine]
    versions: Options
    environment: Options

    @property
    def train_length(self) -> int:
        return self.measurements[0].train_length

    @property
    def step(self) -> int:
        return max(one.step for one in self.measurements)

    def of_study(self, study: str) -> list[Measurement]:
        return [one for one in self.measurements if one.study == study]

    def commands(self) -> list[str]:
        """What to type to make these numbers again."""
        return [train_command(self.config, self.path), *self._commands_of_eval(), *self._other_commands()]

    def _commands_of_eval(self) -> list[str]:
        ways: dict[tuple[tuple[str, ...], int], dict[str, None]] = {}
        for one in self.of_study("eval"):
            flags = _text_flags(one, self.config) if one.protocol else ()
            ways.setdefault((flags, one.examples), {})[str(one.length)] = None
        return [
            shlex.join([*shlex.split(eval_command(self.path, ",".join(lengths), examples)), *flags])
            for (flags, examples), lengths in ways.items()
        ]

    def _other_commands(self) -> list[str]:
        found: dict[tuple[str, ...], dict[str, None]] = {}
        for study, command, setting in (("stretch", "stretch", "chunk"), ("diagnosis", "diagnose", "queries")):
            for one in self.of_study(study):
                if one.examples and setting in one.protocol:
                    flags = ("--examples", str(one.examples), f"--{setting}", str(one.protocol[setting]))
                    found.setdefault((command, *flags), {})[str(one.length)] = None
        return [
            shlex.join(["tra", command, str(self.path), "--lengths", ",".join(lengths), *flags])
            for (command, *flags), lengths in found.items()
        ]


def _text_flags(one: Measurement, config: RunConfig) -> tuple[str, ...]:
    """Flags of `tra eval` by which a measurement of a text run differs from the usual."""
    protocol = one.protocol
    places = config.task_options.get("data", ())
    own = ", ".join([places] if isinstance(places, str) else places)
    flags: list[str] = []
    if protocol.get("data") != own:
        flags += ["--data", str(protocol.get("data"))]
    split = str(protocol.get("split", "validation")).split(" ")[0]
    if split != "validation" and not (split == "all" and flags):
        flags += ["--split", split]
    if protocol.get("stride") != one.size - 1:
        flags += ["--stride", str(protocol.get("stride"))]
    if "frame" in protocol:
        flags += ["--frame", str(protocol["frame"])]
    return tuple(flags)


def collect(paths: Iterable[str | Path]) -> list[Run]:
    """All measured runs in the folders, each of which is a run or holds runs."""
    runs = []
    folders = [Path(path) for path in paths]
    for path in folders:
        if not path.is_dir():
            raise RunError(f"there is no folder {path} to report on")
        older = _measured_by_older_versions(path)
        configs = [path / "config.yaml"] if (path / "config.yaml").exists() else sorted(path.rglob("config.yaml"))
        for config in configs:
            folder = RunFolder(config.parent)
            found = with_others(folder.results.read(), older.get(folder.path.resolve().name, []))
            if found:
                runs.append(_run(folder, path, found))
    if not runs:
        raise RunError(f"no measured run in {', '.join(map(str, folders))}; measure with `tra eval RUN` first")
    return runs


def _measured_by_older_versions(path: Path) -> dict[str, list[Measurement]]:
    """{name of a run's folder: measurements} of old stretch.json and diagnosis.json files, which held several runs."""
    found: dict[str, list[Measurement]] = {}
    for name in LEGACY_FILES:
        for file in sorted(path.rglob(name)):
            if is_legacy(file):
                for run, measurements in legacy_measurements(file).items():
                    found.setdefault(run, []).extend(measurements)
    return found


def _run(folder: RunFolder, root: Path, found: list[Measurement]) -> Run:
    values = read_yaml(folder.config_file)
    config = RunConfig.from_dict(values, str(folder.config_file))
    newest: dict[str, int] = {}
    for one in found:
        newest[one.study] = max(one.step, newest.get(one.study, 0))
    records = {name: values.get(name) for name in ("versions", "environment")}
    return Run(
        name=folder.path.name if folder.path == root else str(folder.path.relative_to(root)),
        path=folder.path,
        config=config,
        measurements=_with_chance([one for one in found if one.step == newest[one.study]], config),
        training=training_lines(folder),
        versions=_mapping(records["versions"]),
        environment=_mapping(records["environment"]),
    )


def measured_runs(measured: Mapping[str, list[Measurement]]) -> list[Run]:
    """{run folder: measurements} as runs, for a command that has just measured them."""
    return [_run(RunFolder.open(path), Path(path), found) for path, found in measured.items()]


def _mapping(value: object) -> Options:
    return value if isinstance(value, dict) else {}


def training_lines(folder: RunFolder) -> list[TrainingLine]:
    """The lines of metrics.jsonl that hold a step and a loss; a damaged log leaves gaps, never an error."""
    lines = []
    for row in folder.read_metrics():
        if not isinstance(row, dict):
            continue
        step, loss, accuracy, tokens = (_number(row.get(name)) for name in ("step", "loss", "accuracy", "tokens"))
        if step is not None and loss is not None:
            lines.append(TrainingLine(int(step), loss, accuracy, None if tokens is None else int(tokens)))
    return lines


def _number(value: object) -> float | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return None


def _with_chance(measurements: list[Measurement], config: RunConfig) -> list[Measurement]:
    """Chance beside every accuracy that was measured before it was recorded."""

    def is_lacking(one: Measurement) -> bool:
        return one.chance is None and metric_named(one.metric).has_chance

    lengths = dict.fromkeys(str(one.length) for one in measurements if is_lacking(one))
    if not lengths:
        return measurements
    splits: dict[tuple[str, str], Task] = {}
    try:
        for split in build_task(config.task, config.task_options).test_splits(lengths):
            splits[split.name, split.length] = split.task
    except TraformerError:
        return measurements  # a task of another version: its numbers are shown without
    filled = []
    for one in measurements:
        task = splits.get((one.whole_split, str(one.length)))
        if task is not None and is_lacking(one) and not one.is_of_group:
            one = one.replace(chance=task.chance(one.metric))
        filled.append(one)
    return filled


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


def _flatten(config: RunConfig) -> JsonObject:
    flat: JsonObject = {}
    for name, value in config.to_dict().items():
        if name in _NOT_IN_LABELS:
            continue
        if isinstance(value, dict):
            flat.update({f"{name}.{key}": item for key, item in value.items()})
        else:
            flat[name] = value
    return flat


def display_task(task: str) -> str:
    """A task's name as people read it."""
    return TASKS[task].label if task in TASKS else task.replace("_", " ")


def display_split(split: str) -> str:
    """A split's name as people read it; nothing for a task's only one."""
    return {"iid": "IID", "test": ""}.get(split, split)


def unit_of(task: str) -> str:
    """What a task's lengths count."""
    return TASKS[task].length_unit if task in TASKS else "tokens"
