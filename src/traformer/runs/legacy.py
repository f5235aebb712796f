"""What earlier versions kept beside results.json, as measurements: stretch.json and diagnosis.json. Free of torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from traformer.errors import RunError
from traformer.runs.measurements import Measurement
from traformer.types import JsonObject, Options

Row = Options
LEGACY_FILES = ("stretch.json", "diagnosis.json")


def is_legacy(file: Path) -> bool:
    """Whether a file is of an earlier version; today's exports of these names hold rows with a metric each."""
    return file.name in LEGACY_FILES and any("metric" not in row for row in _rows(file))


def legacy_measurements(file: Path) -> dict[str, list[Measurement]]:
    """{name of a run's folder: its measurements}; one file may hold several runs."""
    found: dict[str, list[Measurement]] = {}
    heads: dict[tuple[str, int, int], list[Row]] = {}
    for number, row in enumerate(_rows(file)):
        if "metric" in row:  # an export of today: the run's own store has it
            continue
        try:
            made = list(_from_stretch(row) if "status" in row else _from_diagnosis(row))
            found.setdefault(Path(row["run"]).name, []).extend(made)
            if row.get("kind") == "head":
                heads.setdefault((Path(row["run"]).name, row["step"], row["length"]), []).append(row)
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(f"{file}: row {number + 1} cannot be read ({error!r}); move the file away") from None
    for (run, _, _), rows in heads.items():
        found[run] += _over_heads(rows)
    return found


def _rows(file: Path) -> list[Row]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        rows = found["rows"] if isinstance(found, dict) else found
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError
    except (OSError, ValueError, KeyError, RecursionError) as error:
        raise RunError(f"{file} cannot be read as measured rows; move it away") from error
    return rows


def _common(row: Row, study: str) -> JsonObject:
    names = ("task", "attention", "seed", "step", "train_length")
    return {**{name: row[name] for name in names}, "study": study, "low": None, "high": None}


def _from_stretch(row: Row) -> Iterator[Measurement]:
    """One row of a run, split and length."""
    protocol = {name: row[name] for name in ("chunk", "threads", "time_limit", "seconds") if name in row}
    common = {
        **_common(row, "stretch"), "split": row["split"], "length": row["length"], "examples": row["examples"],
        "protocol": protocol,
    }  # fmt: skip
    if row["status"] != "measured":
        yield Measurement(metric="exact_match", value=None, note=f"{row['status']}: {row['reason']}", **common)
    else:
        ends = {"low": row["exact_low"], "high": row["exact_high"]}
        chance = row.get("chance")
        yield Measurement(
            metric="exact_match", value=row["exact_match"], counted=row["examples"], chance=chance, **{**common, **ends}
        )
        errors = {"low": 0.0, "high": row["error_upper_bound"]}
        yield Measurement(
            metric="error_per_read", value=row["error_per_answer"], counted=row["answers"], **{**common, **errors}
        )
    for old, metric in (
        ("keys_read_mean", "keys_read"), ("keys_read_most", "keys_read_most"), ("keys_kept_mean", "keys_kept"),
        ("microseconds_per_token", "microseconds_per_token"),
        ("cpu_microseconds_per_token", "cpu_microseconds_per_token"),
    ):  # fmt: skip
        if row.get(old) is not None:
            yield Measurement(metric=metric, value=float(row[old]), **common)


_OF_HEADS = {
    "residue": "residue", "source": "source_weight", "marks": "marks", "positive": "positive_keys",
    "decay": "gate_decay", "lifted": "lifted_pairs", "log_ratio": "lift_in_nats",
}  # fmt: skip


def _from_diagnosis(row: Row) -> Iterator[Measurement]:
    """One row of a run, length and head, or of a distance. How many sequences there were was not kept: 0."""
    common = _of_diagnosis(row)
    if row["kind"] == "distance":
        at = {"distance": row["from"], "to": row["to"]}
        yield Measurement(metric="lifted_by_distance", value=row["lifted"], counted=row["pairs"], at=at, **common)
        return
    at = {"layer": row["layer"], "head": row["head"]}
    for old, metric in _OF_HEADS.items():
        if row.get(old) is not None:
            counted = row["pairs"] if old == "lifted" else row["queries"]
            yield Measurement(metric=metric, value=row[old], counted=counted, at=at, **common)


def _of_diagnosis(row: Row) -> JsonObject:
    return {
        **_common(row, "diagnosis"), "split": "test", "length": row["length"], "examples": 0,
        "protocol": {"train_tokens": row["train_tokens"]},
    }  # fmt: skip


def _over_heads(rows: list[Row]) -> Iterator[Measurement]:
    """Lifted pairs over all heads of a run, step and length."""
    pairs = sum(row["pairs"] for row in rows)
    lifted = sum(row["lifted"] * row["pairs"] for row in rows)
    nats = sum(row["log_ratio"] * row["lifted"] * row["pairs"] for row in rows)
    common = _of_diagnosis(rows[0])
    yield Measurement(metric="lifted_pairs", value=lifted / pairs if pairs else 0.0, counted=pairs, **common)
    yield Measurement(metric="lift_in_nats", value=nats / lifted if lifted else 0.0, counted=round(lifted), **common)
