"""What a person sees of a sweep: one live table on a terminal, plain lines in a pipe."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from traformer.sweeps.local import CellState, SweepView
from traformer.terminal import new_table, say, stderr_console

PLAIN_SECONDS = 30.0
_STYLE = {"done": "green", "skipped": "green", "failed": "red", "running": "cyan", "stopped": "yellow"}


class Overview(SweepView):
    """Use as a context manager."""

    def __init__(self, console: Console | None = None, waves: bool = False) -> None:
        """`waves`: the cells are one wave of several, of which more follow from what these measure."""
        self.console = console or stderr_console()
        self.live = Live(console=self.console, refresh_per_second=4) if self.console.is_terminal else None
        self.unit, self.within = ("cells of this wave", " of it") if waves else ("cells", "")
        self.started = self.last_line = time.monotonic()
        self.last_draw = 0.0
        self.states: Sequence[CellState] = []

    def __enter__(self) -> Overview:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.live:
            self.live.update(self.table(self.states))
            self.live.stop()

    def changed(self, state: CellState) -> None:
        if (not self.live and state.status != "waiting") or state.message:
            took = f" in {duration(state.seconds)}" if state.status in ("done", "failed") and state.seconds else ""
            line = f"{state.cell.name}: {state.status}{took}" + (f": {state.message}" if state.message else "")
            if self.live:
                self.live.console.print(line, markup=False)
            else:
                say(line)

    def tick(self, states: Sequence[CellState]) -> None:
        now = time.monotonic()
        self.states = states
        if self.live and now - self.last_draw > 0.5:
            self.last_draw = now
            self.live.update(self.table(states))
        elif not self.live and now - self.last_line > PLAIN_SECONDS:
            self.last_line = now
            running = "; ".join(f"{s.cell.name} {s.progress_text()}" for s in states if s.status == "running")
            say(f"{self.summary(states)}: {running}")

    def table(self, states: Sequence[CellState]) -> Table:
        table = new_table(self.summary(states), left=("cell", "state", "progress"))
        for state in states:
            where = state.message if state.status == "failed" else state.progress_text()
            status = f"[{_STYLE.get(state.status, 'default')}]{state.status}[/]"
            table.add_row(escape(state.cell.name), status, escape(where))
        return table

    def summary(self, states: Sequence[CellState]) -> str:
        done = sum(state.status in ("done", "skipped") for state in states)
        failed = sum(state.status == "failed" for state in states)
        left = time_left(states, time.monotonic() - self.started)
        return (
            f"{done} of {len(states)} {self.unit} done"
            + (f", {failed} failed" if failed else "")
            + (f", about {duration(left)}{self.within} left" if left is not None else "")
        )


def time_left(states: Sequence[CellState], elapsed: float) -> float | None:
    """Seconds, from how fast this sweep has gone so far; None while nothing can be said."""
    counted = [state for state in states if state.status != "failed"]
    done_now = sum(state.work * (state.share() - state.first_share) for state in counted)
    to_do = sum(state.work * (1 - state.share()) for state in counted)
    return elapsed * to_do / done_now if done_now > 0 and elapsed > 5 else None


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
