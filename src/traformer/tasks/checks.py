"""Checks of a task's settings: the checked value, or one sentence."""

from __future__ import annotations

import operator
from typing import SupportsIndex, cast

from traformer.errors import InputError


def whole(name: str, value: object) -> int:
    """The value as an int, or a sentence; a float such as 50.0 is refused, so that nothing is rounded silently."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(cast(SupportsIndex, value))
    except TypeError:
        raise InputError(f"{name} must be a whole number, not {value!r}") from None


def check_count(name: str, value: object, least: int, why: str) -> int:
    """A count of at least `least`, or a sentence."""
    count = whole(name, value)
    if count < least:
        raise InputError(f"{name} {count} is too small; {why}, so give at least {least}")
    return count


def store(task: object, **values: object) -> None:
    """Set checked settings on a frozen dataclass; for use in __post_init__ only."""
    for name, value in values.items():
        object.__setattr__(task, name, value)
