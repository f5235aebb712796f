"""The same sweep on a Ray cluster: every cell a task with its share of CPUs or a GPU.

A worker or node that dies has its cell started again by Ray, and the cell resumes from its newest checkpoint wherever
the run folder can be seen (a shared path, or the same machine). Where it cannot be seen from here, the small files
(config, metrics, results) come back with the task's result and are written here.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from traformer.errors import InputError, RunError, TraformerError
from traformer.storage import make_folder
from traformer.sweeps.cell import Cell, run_cell
from traformer.sweeps.local import KILLED_RETRIES, CellState, SweepView, plan, stopped
from traformer.types import JsonObject

SMALL_FILES = ("config.yaml", "metrics.jsonl", "results.json", "diverged.txt")


def run_ray_sweep(
    cells: Sequence[Cell], out: str | Path, address: str, view: SweepView | None = None
) -> list[CellState]:
    """As `run_sweep`, on the cluster at `address`, or on one of this machine's own for "local"."""
    try:
        import ray
    except ImportError:
        raise InputError("ray is not installed; leave --ray out, or: pip install 'traformer[ray]'") from None

    view = view or SweepView()
    out = Path(out).absolute()
    states = plan(cells, out)
    make_folder(out)
    for state in states:
        view.changed(state)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    started_here = not ray.is_initialized()
    if started_here:
        _connect(ray, address)
    pending: dict[Any, CellState] = {}
    try:
        for state in states:
            if state.status == "waiting":
                pending[_submit(ray, state)] = state
        while pending:
            ready, _ = ray.wait(list(pending), timeout=0.5)
            for reference in ready:
                _finish(ray, reference, pending.pop(reference), view)
            for state in pending.values():
                if state.status == "waiting" and state.folder.is_run():
                    state.status, state.started = "running", time.monotonic()
                    view.changed(state)
            view.tick(states)
    except KeyboardInterrupt:
        for reference in pending:
            ray.cancel(reference)  # an interrupt in the worker, which saves and stops
        ray.wait(list(pending), num_returns=len(pending), timeout=60)
        raise stopped(out, signal.SIGINT) from None
    finally:
        if started_here:
            ray.shutdown()
    return states


def _connect(ray: Any, address: str) -> None:
    try:
        ray.init(address=None if address == "local" else address, log_to_driver=False, configure_logging=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RunError(f"no Ray cluster answers at {address!r} ({first}); start one, or give --ray local") from None


def _submit(ray: Any, state: CellState) -> Any:
    config = state.cell.config
    threads = config.threads or 1
    wants_gpu = config.device.startswith("cuda") or (
        config.device == "auto" and ray.cluster_resources().get("GPU", 0) >= 1
    )
    task = ray.remote(
        max_retries=KILLED_RETRIES,
        num_cpus=threads,
        num_gpus=1 if wants_gpu else 0,
        memory=state.memory,
        runtime_env={"env_vars": {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}},
    )(_work)
    state.attempts += 1
    return task.remote(state.cell.to_dict(), str(state.folder.path))


def _work(spec: JsonObject, path: str) -> JsonObject:
    """In a Ray worker: the cell, then what of it is small enough to send back."""
    import ray

    outcome: JsonObject = {"node": ray.get_runtime_context().get_node_id(), "error": None, "files": {}}
    try:
        run_cell(Cell.from_dict(spec), path, quiet=True)
    except TraformerError as error:
        outcome["error"] = str(error)
    for name in SMALL_FILES:
        file = Path(path) / name
        if file.exists():
            outcome["files"][name] = file.read_bytes()
    return outcome


def _finish(ray: Any, reference: Any, state: CellState, view: SweepView) -> None:
    if state.started:
        state.seconds = time.monotonic() - state.started
    try:
        outcome = ray.get(reference)
    except Exception as error:  # a worker that died too often, or a bug in a cell: this cell's failure alone
        state.status, state.message = "failed", " ".join(str(error).split())[-300:]
    else:
        state.node = outcome["node"]
        if not state.folder.is_run():  # made where this machine cannot see it
            state.folder.path.mkdir(parents=True, exist_ok=True)
            for name, content in outcome["files"].items():
                (state.folder.path / name).write_bytes(content)
        if outcome["error"]:
            state.status, state.message = "failed", outcome["error"]
        else:
            state.finish()
    view.changed(state)
