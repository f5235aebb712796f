"""What a person sees while a run trains: a bar on a terminal, plain lines in a pipe or a log."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from traformer.terminal import ProgressBar

if TYPE_CHECKING:
    from rich.console import Console


class TrainingProgress:
    """Use as a context manager; `quiet` shows nothing (the other ranks, and library use)."""

    def __init__(self, title: str, steps: int, quiet: bool = False, console: Console | None = None) -> None:
        self.title, self.steps = title, steps
        self.bar = ProgressBar(
            "{task.completed:.0f}/{task.total:.0f}",
            "loss {task.fields[loss]}  {task.fields[speed]} tokens/s",
            quiet=quiet,
            console=console,
        )
        self.bar.start(title, steps, loss="–", speed="–")
        self.last_update = 0.0

    def __enter__(self) -> TrainingProgress:
        self.bar.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.__exit__(*error)

    def say(self, text: str) -> None:
        """One line, above the bar if there is one."""
        self.bar.say(text)

    def step(self, step: int, loss: float, speed: float) -> None:
        """After every step; redraws at most ten times a second."""
        now = time.monotonic()
        if self.bar.is_live and (now - self.last_update > 0.1 or step == self.steps):
            self.last_update = now
            self.bar.update(completed=step, loss=f"{loss:.4f}", speed=f"{speed:,.0f}")

    def log(self, step: int, loss: float, accuracy: float | None, lr: float, speed: float) -> None:
        """At every log step; a line when there is no bar."""
        if not self.bar.is_live:
            right = "" if accuracy is None else f"  accuracy {accuracy:.3f}"
            self.say(
                f"{self.title}  step {step}/{self.steps}  loss {loss:.4f}{right}  lr {lr:.2e}  {speed:,.0f} tokens/s"
            )
