"""Ctrl-C and SIGTERM as a request: the run finishes its step, saves, and says how to go on."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from traformer.errors import RunError


class Interrupted(RunError):
    """The run was asked to stop and has saved itself."""

    def __init__(self, path: Path, step: int, steps: int, number: int) -> None:
        self.path, self.step, self.steps, self.number = path, step, steps, number
        self.exit_status = 128 + number
        super().__init__(f"stopped at step {step} of {steps} and saved; go on with: tra train --resume --out {path}")

    def __reduce__(self) -> tuple[Any, ...]:  # so that it can be sent to other processes
        return type(self), (self.path, self.step, self.steps, self.number)


class StopRequest:
    """As a context manager, notes the first SIGINT or SIGTERM in `number`; a second one acts at once, as usual."""

    def __init__(self) -> None:
        self.number = 0
        self.previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self.previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)
