"""Argument types that several commands share."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

import yaml

from traformer.errors import InputError
from traformer.types import JsonObject

if TYPE_CHECKING:
    from traformer.runs.measurements import Measurement

_UNITS = {"": 1, "k": 1024, "m": 1024 * 1024}


def positive_int(text: str) -> int:
    """A whole number above zero; `64k` is 64 * 1024 and `1m` 1024 * 1024."""
    match = re.fullmatch(r"(\d+)([km]?)", text.strip().lower())
    if match is None or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above zero (such as 512 or 64k)")
    return int(match[1]) * _UNITS[match[2]]


def finite_number(text: str) -> float:
    """A number that is neither infinite nor NaN."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")
    return value


def positive_number(text: str) -> float:
    """A finite number above zero."""
    value = finite_number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above zero")
    return value


def key_value(text: str) -> tuple[str, object]:
    """`name=value`, the value read as YAML: numbers, true/false, [lists] and plain words."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form name=value")
    try:
        parsed = yaml.safe_load(value)
    except yaml.YAMLError:
        raise argparse.ArgumentTypeError(f"the value of {text!r} is not readable") from None
    if isinstance(parsed, str):
        with suppress(ValueError):
            parsed = float(parsed)  # YAML takes 1e-3 for text
    return name.strip().replace("-", "_"), parsed


def options_once(flag: str, pairs: Iterable[tuple[str, object]]) -> dict[str, object]:
    """The pairs of a repeatable NAME=VALUE flag; a name that is given twice is refused."""
    options: dict[str, object] = {}
    for name, value in pairs:
        if name in options:
            raise InputError(f"{flag} {name} is given twice, as {options[name]!r} and {value!r}; give it once")
        options[name] = value
    return options


def add_threads(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--threads", type=positive_int, metavar="N", help="CPU threads for torch (default: torch's choice)"
    )


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, or auto: a GPU if there is one (default)")


def add_lengths(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lengths",
        nargs="+",
        metavar="N",
        help="in the task's unit: 128 512 2k or 51-100, separated by spaces or commas (default: the task's own)",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table, for scripts")


def print_json(value: object) -> None:
    """Print what `--json` asks for; nothing else may go to stdout then."""
    print(json.dumps(value, indent=1, default=str))


def measurement_rows(measured: Mapping[str, Iterable[Measurement]]) -> list[JsonObject]:
    """{run: measurements} as rows of JSON, each with its run."""
    return [{"run": run, **one.to_row()} for run, found in measured.items() for one in found]


def joined(lengths: list[str] | None) -> str | None:
    """`--lengths 128 256` and `--lengths 128,256` as one comma-separated text, which tasks read."""
    return None if lengths is None else ",".join(part.strip(",") for part in lengths)
