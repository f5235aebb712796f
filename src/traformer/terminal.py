"""What a person sees: lines and progress bars on stderr, tables on stdout. Loads without rich; its functions load it.

Work continues whether or not anybody reads the output: a line that cannot be written is dropped.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDTH = 160  # of a table in a pipe or a file


def say(text: str) -> None:
    """One line on stderr."""
    with suppress(OSError, ValueError):  # the reader has gone, the disk is full, stderr is closed
        print(text, file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """One line on stderr about something that was passed over or is slower than it could be."""
    say(f"tra: warning: {text}")


def stdout_console(width: int = WIDTH) -> Console:
    """A console on stdout: as wide as the terminal, or `width` where there is none."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=width, highlight=False)


def stderr_console() -> Console:
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def show(*tables: Table, width: int = WIDTH) -> None:
    """Print tables on stdout."""
    console = stdout_console(width)
    for table in tables:
        console.print(table)


def new_table(title: str | None = None, left: Iterable[str] = (), right: Iterable[str] = ()) -> Table:
    """A table without rows: first the columns aligned left, then those aligned right."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for name in left:
        table.add_column(name)
    for name in right:
        table.add_column(name, justify="right")
    return table


class ProgressBar:
    """One bar on a terminal; nothing in a pipe, where `say` prints lines all the same. Use as a context manager."""

    def __init__(self, *details: str, quiet: bool = False, console: Console | None = None) -> None:
        """`details` are templates of rich, such as "loss {task.fields[loss]}", shown between bar and time left."""
        from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

        self.quiet = quiet
        console = console or stderr_console()
        self.is_live = console.is_terminal and not quiet
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            *(TextColumn(detail) for detail in details),
            TimeRemainingColumn(),
            console=console,
            disable=not self.is_live,
        )
        self._row = TaskID(0)

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def start(self, title: str, total: float, **fields: Any) -> None:
        """Show the bar, empty."""
        self._row = self._bar.add_task(title, total=total, **fields)

    def update(self, *, title: str | None = None, **changes: Any) -> None:
        """Move it: `completed` or `advance`, and the fields of the details."""
        if title is not None:
            changes["description"] = title
        self._bar.update(self._row, **changes)

    def say(self, text: str) -> None:
        """One line, above the bar if there is one."""
        if self.quiet:
            return
        if self.is_live:
            self._bar.console.print(text, markup=False)
        else:
            say(text)
