"""What a person sees while a run goes on: a bar on a terminal, plain lines in a pipe or a log."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class TrainingProgress:
    """Use as a context manager; `quiet` shows nothing (the other ranks, and library use)."""

    def __init__(self, title: str, steps: int, quiet: bool = False, console: Console | None = None) -> None:
        self.title, self.steps, self.quiet = title, steps, quiet
        self.console = console or Console(stderr=True, highlight=False)
        self.is_live = self.console.is_terminal and not quiet
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}  {task.fields[speed]} tokens/s"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.is_live,
        )
        self.row = self.bar.add_task(title, total=steps, loss="–", speed="–")
        self.last_update = 0.0

    def __enter__(self) -> TrainingProgress:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def say(self, text: str) -> None:
        """One line, above the bar if there is one."""
        if not self.quiet:
            if self.is_live:
                self.bar.console.print(text, markup=False)
            else:
                print(text, file=sys.stderr, flush=True)

    def step(self, step: int, loss: float, speed: float) -> None:
        """After every step; redraws at most ten times a second."""
        now = time.monotonic()
        if self.is_live and (now - self.last_update > 0.1 or step == self.steps):
            self.last_update = now
            self.bar.update(self.row, completed=step, loss=f"{loss:.4f}", speed=f"{speed:,.0f}")

    def log(self, step: int, loss: float, accuracy: float, lr: float, speed: float) -> None:
        """At every log step; a line when there is no bar."""
        if not self.is_live:
            self.say(
                f"{self.title}  step {step}/{self.steps}  loss {loss:.4f}  accuracy {accuracy:.3f}"
                f"  lr {lr:.2e}  {speed:,.0f} tokens/s"
            )
