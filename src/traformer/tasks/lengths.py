"""Lengths as people write them, and the ranges that a task is tested on."""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from traformer.errors import InputError
from traformer.tasks import rng


def length_label(low: int, high: int) -> str:
    """ "80" for one length, "51-100" for a range."""
    return str(high) if low == high else f"{low}-{high}"


_LENGTH = re.compile(r"(\d+)([km]?)(?:-(\d+)([km]?))?", re.IGNORECASE)
_SUFFIX = {"": 1, "k": 1 << 10, "m": 1 << 20}


def parse_lengths(lengths: str | Iterable[int | str]) -> list[tuple[int, int]]:
    """ "20,40,51-100,2k" or a list of such parts -> [(20, 20), (40, 40), (51, 100), (2048, 2048)]."""
    parts: list[int | str] = [*lengths.split(",")] if isinstance(lengths, str) else list(lengths)
    if not parts or parts == [""]:
        raise InputError("lengths is empty; give for example 20,40,80 or 51-100")
    ranges = []
    for part in parts:
        found = _LENGTH.fullmatch(str(part).strip())
        if found is None:
            raise InputError(f"lengths has {str(part)!r}; give whole numbers or ranges, for example 20,40,80 or 51-100")
        first, first_suffix, last, last_suffix = found.groups()
        low = int(first) * _SUFFIX[first_suffix.lower()]
        high = low if last is None else int(last) * _SUFFIX[last_suffix.lower()]
        if high < low:
            raise InputError(f"lengths has the range {part!r}, which ends before it starts; write {high}-{low}")
        ranges.append((low, high))
    return ranges


def buckets(low: int, width: int, count: int) -> list[tuple[int, int]]:
    """(low, width), (width + 1, 2 width), ...: the trained lengths, then ranges of the same reach beyond them."""
    return [(low if step == 0 else step * width + 1, (step + 1) * width) for step in range(count)]


def draw_lengths(keys: rng.Words, purpose: int, low: int, high: int) -> NDArray[np.int64]:
    """Lengths uniform in low .. high; [count]."""
    return rng.below(rng.draw(keys, purpose), high - low + 1) + low
