"""`tra sweep EXPERIMENT`: every cell of a list, then a report."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from traformer.commands.arguments import positive_int, print_json
from traformer.errors import InputError

if TYPE_CHECKING:
    from traformer.sweeps.cell import Cell
    from traformer.sweeps.find import NextCells
    from traformer.sweeps.local import CellState


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("experiment", help="a name (see `tra list experiments`), a .py file or a module with cells()")
    parser.add_argument("--out", metavar="DIR", help="where the runs go (default: runs/EXPERIMENT)")
    parser.add_argument("--jobs", type=positive_int, help="cells at once (default: cores / threads per cell)")
    parser.add_argument(
        "--ray", metavar="ADDRESS", help="run on a Ray cluster: its address, auto, or local for one on this machine"
    )
    add_records(parser)
    parser.add_argument("--list", action="store_true", help="print the cells' commands and run nothing")
    parser.add_argument(
        "--show", action="store_true", help="run nothing: report what is done, or recorded in --records, so far"
    )
    parser.add_argument("--json", action="store_true", help="with --list: print JSON, for scripts")


def add_records(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--records",
        metavar="FILE",
        help="take finished cells from this file, and add each one to it: a sweep continues on another machine",
    )


def main(args: argparse.Namespace) -> int:
    from traformer.sweeps.find import experiment_cells, find_experiment, next_cells_of

    module = find_experiment(args.experiment)
    out = args.out or f"runs/{Path(args.experiment).stem}"
    cells = experiment_cells(module)
    if args.json and not args.list:
        raise InputError("--json is for --list; `tra report DIR --json` prints what a sweep measured")
    if args.list and args.json:
        print_json([{"name": cell.name, "commands": cell.commands(f"{out}/{cell.name}")} for cell in cells])
        return 0
    if args.list:
        for cell in cells:
            print("\n".join(cell.commands(f"{out}/{cell.name}")))
        return 0
    if args.ray and args.jobs:
        raise InputError(
            "--jobs is for this machine's processes; on Ray the cluster's resources decide, so leave it out"
        )
    title, more = getattr(module, "TITLE", None), next_cells_of(module)
    if args.show and (args.jobs or args.ray):
        raise InputError("--show runs nothing, so leave out --jobs and --ray")
    if args.show:
        if args.records:
            check_shown(args.records)
            restore_all(cells, out, args.records, more)
        report(out, title, module)
        return 0
    return run_and_report(cells, out, args.jobs, title, args.ray, more, module, args.records)


def check_shown(records: str) -> None:
    """Refuse to show a file of records that is not there."""
    if not Path(records).exists():
        raise InputError(f"there is no file {records} to show; give --records a file of finished cells or leave it out")


def restore_all(cells: list[Cell], out: str, records: str, next_cells: NextCells | None) -> None:
    """Lay out every recorded cell of a sweep, those of later waves included, whether or not earlier ones are there."""
    from traformer.runs.folder import RunFolder
    from traformer.sweeps.cell import is_done
    from traformer.sweeps.records import read_records, restore

    known = read_records(records)
    missing: list[str] = []  # passed over, as cells that failed are, so that the next wave comes
    while cells:
        restore(cells, known, out)
        missing += [cell.name for cell in cells if not is_done(cell, RunFolder(Path(out) / cell.name))]
        cells = next_cells(Path(out), missing) if next_cells else []
    if not Path(out).exists():
        raise InputError(
            f"no cell in {records} has the settings of this sweep, so there is nothing to show; "
            "give the records of this experiment, with the text they were made with"
        )


def run_and_report(
    cells: list[Cell],
    out: str,
    jobs: int | None,
    title: str | None,
    ray: str | None = None,
    next_cells: NextCells | None = None,
    experiment: ModuleType | None = None,
    records: str | None = None,
) -> int:
    """Run the sweep, print its table, write its page; 1 if a cell failed.

    `next_cells(out, failed)`: the cells that can run now, where later cells depend on what earlier ones measured (a
    rate is chosen, then the table runs with it). It is asked again until it has none left; `failed` names the cells
    that failed and are not tried again. The hypotheses of `experiment`, if it has any, are printed with their outcomes.
    `records`: a file of finished cells, which need not run again and to which others are added.
    """
    import time

    from traformer.storage import check_folder
    from traformer.sweeps.overview import duration

    check_folder(Path(out))
    started = time.monotonic()
    states: list[CellState] = []
    failing: list[str] = []
    while cells := next_cells(Path(out), failing) if next_cells else cells:
        states += run_cells(cells, out, jobs, ray, records, waves=next_cells is not None)
        failing = [state.cell.name for state in states if state.status == "failed"]
        if not next_cells:
            break
    failed = [state for state in states if state.status == "failed"]
    for state in failed:
        print(f"failed: {state.cell.name}: {state.message}")
    if not states or len(failed) < len(states):  # no cell is left where every wave was done before
        report(out, title, experiment)
        print(f"{len(states) - len(failed)} cells in {duration(time.monotonic() - started)}")
    return 1 if failed else 0


def report(out: str, title: str | None, experiment: ModuleType | None) -> None:
    """Print the table and the verdicts of all runs in `out`, and write their page."""
    from traformer.reports.collect import collect
    from traformer.reports.terminal import comparison_table, verdict_tables
    from traformer.reports.verdicts import verdicts_of
    from traformer.reports.write import write_report
    from traformer.terminal import show

    runs = collect([out])
    verdicts = verdicts_of(experiment, out) if experiment else []
    show(*comparison_table(runs), *verdict_tables(verdicts), width=140)
    print(f"the page is {write_report(runs, out, title, verdicts)}")


def run_cells(
    cells: list[Cell], out: str | Path, jobs: int | None, ray: str | None, records: str | None, waves: bool = False
) -> list[CellState]:
    """Run the cells that are neither done nor recorded, here or on Ray, and show how they get on.

    `waves`: they are one wave of several.
    """
    from traformer.sweeps.local import SweepView, run_sweep
    from traformer.sweeps.overview import Overview
    from traformer.sweeps.ray import run_ray_sweep
    from traformer.sweeps.records import Recording, restore

    with Overview(waves=waves) as overview:
        view: SweepView = overview
        if records:
            view = recording = Recording(records, overview)
            restore(cells, recording.records, out)
        return run_ray_sweep(cells, out, ray, view) if ray else run_sweep(cells, out, jobs, view)
