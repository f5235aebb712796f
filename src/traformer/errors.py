"""Errors that the user can fix: each has one sentence that says what was wrong and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TraformerError(Exception):
    """Base of every error that the command line prints as a sentence rather than a traceback."""

    exit_status: int = 2  # of the command that it ends


class InputError(TraformerError, ValueError):
    """An argument that cannot be used: wrong shape, dtype, device, value or name."""


class RunError(TraformerError):
    """A run folder, checkpoint or file that cannot be used as asked."""


class Diverged(RunError):
    """Training whose loss or gradient left the finite numbers."""


class Stopped(RunError):
    """Work that was asked to stop by a signal and has saved itself."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number
        self.exit_status = 128 + signal_number

    def __reduce__(self) -> tuple[type[Stopped], tuple[str, int]]:  # so that it can be sent to other processes
        return type(self), (str(self), self.signal_number)


def unknown_name(kind: str, name: object, known: Iterable[str]) -> InputError:
    """An error that lists the known names and, where one is near, suggests it."""
    by_lower_case = {one.lower(): one for one in known}
    nearest = difflib.get_close_matches(str(name).lower(), by_lower_case, n=1, cutoff=0.5)
    hint = f"; did you mean {by_lower_case[nearest[0]]!r}? " if nearest else ". "
    return InputError(f"unknown {kind} {str(name)!r}{hint}Known: {', '.join(by_lower_case.values())}")


def first_line(error: BaseException) -> str:
    """An error in one line, cut where it is long."""
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return text[:157] + "..." if len(text) > 160 else text
