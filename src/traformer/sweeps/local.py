"""A sweep: every cell of a list as a process of its own, as many at once as cores and memory allow.

    OUT/cells/NAME.json   what the cell is          OUT/logs/NAME.log   what its process printed
    OUT/NAME/             its run folder            OUT/report.html     all of them side by side

Giving the same sweep again skips what is done and continues what is not. A cell that fails stops no other.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from traformer.errors import Stopped, TraformerError
from traformer.runs.folder import RunFolder
from traformer.storage import make_folder, write_atomically
from traformer.sweeps.cell import Cell, Reading, check_names, is_done, not_measured

PROCESS_MEMORY = 700 * 2**20  # of a process that has loaded torch and transformers
PROGRAM = "traformer.sweeps.cell"
KILLED_RETRIES = 3  # a cell whose process was killed is resumed this many times within one sweep
POLL_SECONDS = 0.2


@dataclass
class CellState:
    """A cell on its way: waiting, running, done, skipped (was done before), failed or stopped."""

    cell: Cell
    folder: RunFolder
    work: float  # floats of the same unit for all cells: tokens trained, tokens measured / 3
    memory: int  # bytes of the machine's that its process will need
    status: str = "waiting"
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    seconds: float = 0.0
    attempts: int = 0
    message: str = ""
    first_share: float = 0.0  # of the work, done before this sweep started
    node: str = ""  # where it ran, on a cluster

    @property
    def log(self) -> Path:
        """What its process printed."""
        out = self.folder.path.parents[self.cell.name.count("/")]
        return out / "logs" / f"{self.cell.name}.log"

    def finish(self) -> None:
        """Done, if everything that the cell asks for is there; else failed."""
        missing = not_measured(self.cell, self.folder)
        self.status, self.message = ("failed", _incomplete(self.cell, missing)) if missing else ("done", "")

    def share(self) -> float:
        """How much of the cell's work is done, from its own files."""
        if self.status in ("done", "skipped"):
            return 1.0
        rows = self.folder.read_metrics()
        step = rows[-1]["step"] if rows else 0
        return 0.9 * step / self.cell.config.steps  # the rest is for measuring

    def progress_text(self) -> str:
        rows = self.folder.read_metrics()
        if not rows:
            return ""
        last = rows[-1]
        measured = (
            f", {len(self.folder.results.read())} rows measured" if last["step"] == self.cell.config.steps else ""
        )
        return f"step {last['step']}/{self.cell.config.steps}, loss {last['loss']:.4f}{measured}"


class SweepView:
    """Told what happens; see `experiments.overview` for one that shows it."""

    def changed(self, state: CellState) -> None: ...

    def tick(self, states: Sequence[CellState]) -> None: ...


def plan(cells: Sequence[Cell], out: str | Path) -> list[CellState]:
    """The cells' states before anything runs. A cell that cannot be built is failed already, with its sentence."""
    from traformer.devices import computes_on_cpu
    from traformer.models.from_run import build_model_config
    from traformer.models.memory import memory_need
    from traformer.tasks import build_task

    check_names(cells)
    states = []
    for cell in cells:
        folder = RunFolder(Path(out) / cell.name)
        state = CellState(cell, folder, 1.0, PROCESS_MEMORY)
        states.append(state)
        try:
            task = build_task(cell.config.task, cell.config.task_options)
            model_config = build_model_config(cell.config, task)
            splits = task.test_splits(cell.lengths)
            batch = cell.config.batch_size // cell.config.accumulate
            needs = [memory_need(model_config, task.sequence_length, training=True, batch=batch).total(batch)]
            needs += [memory_need(model_config, s.task.sequence_length, training=False).total(1) for s in splits]
            on_cpu = computes_on_cpu(cell.config.device)
            state.memory = PROCESS_MEMORY + (max(needs) if on_cpu else 0)  # of the machine, not of its GPU
            measured = sum(cell.examples * split.task.sequence_length for split in splits)
            state.work = cell.config.steps * cell.config.batch_size * task.sequence_length + measured / 3
            state.status = "skipped" if is_done(cell, folder) else "waiting"
        except TraformerError as error:
            state.status, state.message = "failed", str(error)
        state.first_share = state.share()
    return states


def default_jobs(cells: Sequence[Cell]) -> int:
    threads = max([cell.config.threads or 1 for cell in cells], default=1)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // threads)


def run_sweep(
    cells: Sequence[Cell], out: str | Path, jobs: int | None = None, view: SweepView | None = None
) -> list[CellState]:
    """Run all cells that are not done; returns every cell's state. Ctrl-C and SIGTERM stop them all, saved."""
    from traformer.models.memory import available_memory

    view = view or SweepView()
    out = Path(out)
    states = plan(cells, out)
    for name in ("cells", "logs"):
        make_folder(out / name)
    for state in states:
        view.changed(state)
    jobs = jobs or default_jobs(cells)
    memory = int(available_memory() * 0.9)
    stop: list[int] = []
    previous = {
        number: signal.signal(number, lambda received, frame: stop.append(received))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        while not stop:
            running = [state for state in states if state.status == "running"]
            waiting = [state for state in states if state.status == "waiting"]
            if not running and not waiting:
                break
            for state in running:
                _look_after(state, view)
            for state in waiting:
                running = [state for state in states if state.status == "running"]
                fits = sum(other.memory for other in running) + state.memory <= memory
                # A cell too large for what is free still gets its turn, alone: training itself says if it cannot fit.
                if len(running) < jobs and (fits or not running):
                    _start(state, out)
                    view.changed(state)
            view.tick(states)
            time.sleep(POLL_SECONDS)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        _stop_all(states, view)
        view.tick(states)
    if stop:
        raise stopped(out, stop[0])
    return states


def stopped(out: Path, signal_number: int) -> Stopped:
    return Stopped(f"the sweep was stopped and its cells have saved; the same command resumes {out}", signal_number)


def _start(state: CellState, out: Path) -> None:
    spec = out / "cells" / f"{state.cell.name}.json"
    spec.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(spec, json.dumps(state.cell.to_dict(), indent=1))
    threads = str(state.cell.config.threads or 1)
    state.log.parent.mkdir(parents=True, exist_ok=True)
    with open(state.log, "ab") as handle:
        state.process = subprocess.Popen(
            [sys.executable, "-m", PROGRAM, str(spec), str(state.folder.path)],
            stdout=handle,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
            start_new_session=True,  # Ctrl-C reaches the sweep alone, which then asks each cell to save
        )
    state.status, state.started, state.attempts = "running", time.monotonic(), state.attempts + 1


def _look_after(state: CellState, view: SweepView) -> None:
    assert state.process is not None
    code = state.process.poll()
    if code is None:
        return
    state.seconds += time.monotonic() - state.started
    killed_by = -code if code < 0 else {130: signal.SIGINT, 143: signal.SIGTERM}.get(code)
    if code == 0:
        state.finish()
    elif killed_by is not None:
        resumes = state.attempts <= KILLED_RETRIES
        state.status = "waiting" if resumes else "failed"
        state.message = f"its process was killed (signal {killed_by:d})" + ("; it resumes" if resumes else "")
    else:
        state.status = "failed"
        state.message = _last_line(state) or f"its process ended with status {code}"
    state.process = None
    view.changed(state)


def _incomplete(cell: Cell, missing: Sequence[Reading]) -> str:
    """Why a cell whose process ended well is not done."""
    readings = ", ".join(" ".join(one) for one in missing)
    remedy = "give the cell lengths" if cell.lengths is None else "choose other lengths for the cell"
    return (
        f"its process ended without an error, but nothing was measured at {readings} after step {cell.config.steps}; "
        f"{remedy} that its task and text reach"
    )


def _last_line(state: CellState) -> str:
    log = state.log
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1].removeprefix("tra: error: ") if lines else ""


def _stop_all(states: Sequence[CellState], view: SweepView) -> None:
    """Ask every running cell to save and stop; those that do not within a minute are killed, which loses little."""
    running = [(state, state.process) for state in states if state.process is not None]
    for _, process in running:
        process.terminate()
    for state, process in running:
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        state.status, state.process = "stopped", None
        view.changed(state)
