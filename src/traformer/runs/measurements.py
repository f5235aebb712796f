"""The store of measurements: every number that a command measured of a run, as typed rows of its results.json.

`measure_missing` is the one protocol by which they come about: read what is there, measure what is missing, write each
part at once, so that an interrupted command continues where it stopped. Free of torch.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from traformer.errors import RunError
from traformer.storage import changing, write_atomically
from traformer.types import JsonObject, Options

RESULTS_FILE = "results.json"
# What a protocol records without changing the number.
RECORDED_ONLY = frozenset({"threads", "time_limit", "seconds"})

Row = JsonObject  # a measurement as JSON holds it


@dataclass(frozen=True)
class Measurement:
    """One number, and all it depends on.

    value     None where it could not be measured; `note` then says why
    low, high the 95 % interval; None where there is none
    counted   of how many things (sequences, tokens, reads, pairs) the number was made
    chance    what the best guess reaches that does not solve the task, where that makes sense
    study     the command that measured it: "eval", "stretch" or "diagnosis"
    at        further coordinates: layer and head, place in a window, distance of a key, ...
    protocol  how it was measured, beyond the number of examples
    """

    task: str
    split: str  # "iid"; "test/reverse" is a group of examples within a split
    length: int | str  # a number where all sequences have that length, else a range such as "51-100"
    metric: str
    value: float | None
    low: float | None
    high: float | None
    examples: int
    seed: int
    attention: str
    step: int
    train_length: int
    counted: int = 0
    study: str = "eval"
    chance: float | None = None
    seen_in_training: float | None = None  # share of the test examples that training has shown
    at: Mapping[str, int | float | str] = field(default_factory=dict)
    protocol: Options = field(default_factory=dict)
    note: str = ""

    @property
    def size(self) -> int:
        """The largest length, to order by and to place on an axis."""
        return largest_length(self.length)

    @property
    def whole_split(self) -> str:
        """The split's name without the group."""
        return self.split.partition("/")[0]

    @property
    def is_of_group(self) -> bool:
        """Whether it is of some examples of a split only, such as those of one instruction."""
        return "/" in self.split

    def replace(self, **changes: Any) -> Measurement:
        return dataclasses.replace(self, **changes)

    def to_row(self) -> Row:
        """As results.json holds it; what has its default is left out."""
        row = {}
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if item.name in _REQUIRED or value != _default(item):
                row[item.name] = dict(value) if isinstance(value, Mapping) else value
        return row

    @classmethod
    def from_row(cls, row: Options) -> Measurement:
        """The inverse of `to_row`; what another version wrote beside the known fields is left out.

        Raises ValueError with a sentence about what is wrong.
        """
        for name, kind in _KINDS.items():
            if name not in row:
                if name in _REQUIRED:
                    raise ValueError(f"has no {name!r}")
            elif isinstance(row[name], bool) or not isinstance(row[name], kind):
                raise ValueError(f"has {name} = {row[name]!r}")
        try:
            largest_length(row["length"])
        except ValueError:
            raise ValueError(f"has length = {row['length']!r}") from None
        return cls(**{name: row[name] for name in _KINDS if name in row})


_NUMBER = (int, float)
_KINDS: dict[str, type | tuple[type, ...]] = {
    "task": str, "split": str, "length": (int, str), "metric": str, "value": (*_NUMBER, type(None)),
    "low": (*_NUMBER, type(None)), "high": (*_NUMBER, type(None)), "examples": int, "seed": int, "attention": str,
    "step": int, "train_length": int, "counted": int, "study": str, "chance": (*_NUMBER, type(None)),
    "seen_in_training": (*_NUMBER, type(None)), "at": Mapping, "protocol": Mapping, "note": str,
}  # fmt: skip
_REQUIRED = frozenset(
    item.name
    for item in dataclasses.fields(Measurement)
    if item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
)


def _default(item: dataclasses.Field[Any]) -> object:
    return item.default if item.default_factory is dataclasses.MISSING else item.default_factory()


def largest_length(length: int | str) -> int:
    """512 -> 512, "51-100" -> 100."""
    return int(str(length).rpartition("-")[2])


def as_length(label: str) -> int | str:
    """A split's label as a measurement holds it: a number where it is one."""
    return int(label) if label.isdigit() else label


def reading_name(split: str, stride: int | None, frame: int | None) -> str:
    """How the store names a split of text that is read in another way: another line of a table."""
    ways = [f"{name} {value}" for name, value in (("stride", stride), ("frame", frame)) if value is not None]
    return " ".join([split, *ways])


# What is wanted ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """A split at a length: all its metrics are measured together, and stored ones of the same settings answer it."""

    split: str
    length: int | str
    step: int
    examples: int
    seed: int
    study: str = "eval"
    protocol: Options = field(default_factory=dict)

    def answered_by(self, found: Measurement) -> bool:
        """Whether a stored measurement is one of those asked for, measured in the same way."""
        return (
            slot(found) == slot(self)
            and (found.examples, found.seed) == (self.examples, self.seed)
            and _decisive(found.protocol) == _decisive(self.protocol)
        )


def slot(of: Measurement | Request) -> tuple[object, ...]:
    """What a number is of. The store keeps one set of settings per slot, so a length never appears twice."""
    return of.study, of.split.partition("/")[0], of.length, of.step, of.protocol.get("data")


def _decisive(protocol: Options) -> JsonObject:
    return {name: value for name, value in protocol.items() if name not in RECORDED_ONLY}


# Where they are kept ----------------------------------------------------------------------------------------------


class ResultStore:
    """The measurements in a run folder."""

    def __init__(self, folder: str | Path) -> None:
        self.file = Path(folder) / RESULTS_FILE

    def read(self) -> list[Measurement]:
        """All of them; none if nothing was measured. A damaged file is a RunError."""
        rows = read_rows(self.file)
        found = [made for number, row in enumerate(rows) for made in _migrated(row, number, self.file)]
        return with_others(found, self._legacy())

    def _legacy(self) -> list[Measurement]:
        """What earlier versions kept in files of their own; it moves into results.json when that is next written."""
        folder = self.file.parent
        files = [file for file in (folder / "stretch" / "stretch.json", folder / "diagnosis.json") if file.exists()]
        if not files:
            return []
        from traformer.runs.legacy import legacy_measurements

        name = folder.resolve().name
        return [one for file in files for one in legacy_measurements(file).get(name, [])]

    def find(self, request: Request) -> list[Measurement]:
        """What answers a request; empty if it has to be measured."""
        return [found for found in self.read() if request.answered_by(found)]

    def missing(self, requests: Iterable[Request]) -> list[Request]:
        """Those that nothing answers."""
        stored = self.read()
        return [request for request in requests if not any(map(request.answered_by, stored))]

    def put(self, measured: Sequence[Measurement]) -> None:
        """Add measurements, replacing those in the same slots. What other processes wrote in the meantime is kept."""
        taken = {slot(one) for one in measured}
        with changing(self.file):
            self.write([*(one for one in self.read() if slot(one) not in taken), *measured])

    def write(self, measurements: Iterable[Measurement]) -> None:
        write_rows(self.file, [one.to_row() for one in measurements])


def with_others(own: Sequence[Measurement], others: Iterable[Measurement]) -> list[Measurement]:
    """`own`, and those of the others whose slots it has nothing for."""
    taken = {slot(one) for one in own}
    return [*own, *(one for one in others if slot(one) not in taken)]


def read_rows(file: Path) -> list[Row]:
    """The rows of a results file; none if there is no file."""
    if not file.exists():
        return []
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{file} cannot be read as JSON; delete it and evaluate again") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise RunError(f"{file} is not a list of rows; delete it and evaluate again")
    return rows


def write_rows(file: Path, rows: Sequence[Row]) -> None:
    """One row per line."""
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    write_atomically(file, f"[\n  {lines}\n]\n" if rows else "[]\n")


def _migrated(row: Row, number: int, file: Path) -> list[Measurement]:
    """A row as measurements. Older text rows hold the loss by place within the row of perplexity."""
    try:
        first = Measurement.from_row(row)
    except ValueError as error:
        raise RunError(f"{file}: row {number + 1} {error}; delete it and evaluate again") from None
    try:
        places = [
            first.replace(
                metric="loss_by_place", value=float(loss), low=None, high=None, at={"place": start, "to": end}
            )
            for start, end, loss in row.get("loss_by_position") or []
        ]
    except (TypeError, ValueError):
        raise RunError(
            f"{file}: row {number + 1} has a loss_by_position that is no list of [from, to, loss]; delete it and "
            "evaluate again"
        ) from None
    return [first, *places]


# How they come about ----------------------------------------------------------------------------------------------

Subject = TypeVar("Subject")


@dataclass(frozen=True)
class Job(Generic[Subject]):
    """A request, the store that may hold its answer, and whatever is needed to measure it."""

    request: Request
    store: ResultStore
    subject: Subject


def measure_missing(
    jobs: Sequence[Job[Subject]],
    measure: Callable[[Job[Subject]], Sequence[Measurement]],
    *,
    again: bool = False,
    on_missing: Callable[[list[Subject]], None] = lambda subjects: None,
    usable: Callable[[Subject, Sequence[Measurement]], bool] = lambda subject, found: True,
) -> Iterator[tuple[Subject, list[Measurement]]]:
    """Each subject with its measurements, in order: from the store where they are, else measured and stored at once.

    `on_missing` hears what will be measured before anything is; `usable` may refuse what was found. With `again`,
    everything is measured.
    """
    stored = {} if again else {job.store.file: job.store.read() for job in jobs}
    answers: list[list[Measurement]] = []
    for job in jobs:
        found = [one for one in stored.get(job.store.file, ()) if job.request.answered_by(one)]
        answers.append(found if found and usable(job.subject, found) else [])
    on_missing([job.subject for job, found in zip(jobs, answers, strict=True) if not found])
    for job, found in zip(jobs, answers, strict=True):
        if not found:
            found = list(measure(job))
            job.store.put(found)
        yield job.subject, found
