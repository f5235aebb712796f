"""`tra reproduce TABLE`: one of the paper's tables, or all: run what is missing, then print it with its verdicts."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from traformer.commands import upcycle
from traformer.commands.arguments import positive_int
from traformer.commands.sweep import add_records, check_shown, run_cells
from traformer.errors import InputError, unknown_name
from traformer.storage import check_file

if TYPE_CHECKING:
    from pathlib import Path

    from traformer.experiments.paper import Part
    from traformer.experiments.paper_results import Summary
    from traformer.experiments.protocol import Verdict

MOST_SEEDS = 1000
MOST_TABLES = 3  # that a reader takes in one by one


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from traformer.experiments.paper import SCALES, TABLE_NAMES

    parser.add_argument("table", metavar="TABLE", help=f"{', '.join(TABLE_NAMES)} or all; or {upcycle.NAME}")
    parser.add_argument(
        "--scale",
        required=True,
        choices=SCALES,
        help="smoke: seconds, only checks that it runs; laptop: the paper's lengths, small models; paper: as published",
    )
    parser.add_argument("--seeds", type=positive_int, help="number of seeds per method (default: the table's own)")
    parser.add_argument("--out", metavar="DIR", help="where the runs go (default: runs/reproduce-SCALE)")
    parser.add_argument("--jobs", type=positive_int, help="cells at once (default: cores / threads per cell)")
    parser.add_argument("--ray", metavar="ADDRESS", help="run on a Ray cluster: its address, auto, or local")
    parser.add_argument(
        "--show", action="store_true", help="run nothing: print the tables of what is done, or recorded, so far"
    )
    add_records(parser)
    upcycle.add_arguments(parser)


def main(args: argparse.Namespace) -> int:
    from pathlib import Path

    from traformer.experiments.paper import COST, TABLE_NAMES, TABLES, parts_of

    if args.table == upcycle.NAME:
        return upcycle.main(args)
    if args.model or args.data or args.threads or args.arms or args.no_tuning:
        raise InputError("--model, --data, --threads, --arms and --no-tuning are for upcycle alone; leave them out")
    if args.table != "all" and args.table not in TABLE_NAMES:
        raise unknown_name("table", args.table, (*TABLE_NAMES, "all", upcycle.NAME))
    if args.ray and args.jobs:
        raise InputError("--jobs is for this machine's processes; on Ray the cluster decides, so leave it out")
    if args.seeds is not None and args.seeds > MOST_SEEDS:
        raise InputError(f"--seeds {args.seeds} is more than {MOST_SEEDS}, the most that a table takes")
    if args.records and args.scale == "smoke":
        raise InputError("--records is for results worth keeping; leave it out with --scale smoke")
    out = Path(args.out or f"runs/reproduce-{args.scale}")
    if args.records:
        check_file(Path(args.records))
        if args.show:
            check_shown(args.records)
    failed = 0
    for name in TABLE_NAMES if args.table == "all" else [args.table]:
        if name == COST:
            if not args.show:
                _cost(args.scale, out / COST)
            continue
        print(f"\n{TABLES[name].title} (scale {args.scale})")
        parts = parts_of(name, args.scale)
        failed += _run([cell for part in parts for cell in part.cells(args.seeds)], out / name, args)
        _show(parts, out / name, args)
    return 1 if failed else 0


def _run(cells: list, out: Path, args: argparse.Namespace) -> int:
    """Run the cells that are not done; the number that failed. Smoke cells are short and share this process."""
    if args.show:
        from traformer.sweeps.records import read_records, restore

        restore(cells, read_records(args.records) if args.records else {}, out)
        return 0
    if args.scale == "smoke" and not args.ray:
        from traformer.sweeps.cell import run_cell

        for cell in cells:
            run_cell(cell, out / cell.name, quiet=True)
        return 0
    states = run_cells(cells, out, args.jobs, args.ray, args.records)
    failed = [state for state in states if state.status == "failed"]
    for state in failed:
        print(f"failed: {state.cell.name}: {state.message}")
    return len(failed)


def _show(parts: list[Part], out: Path, args: argparse.Namespace) -> None:
    """Print every part's table and verdicts, and write them with a figure beside the runs, and beside the records."""
    from pathlib import Path

    from traformer.experiments.paper_results import summaries, verdicts
    from traformer.terminal import new_table, show

    found: list[Verdict] = []
    measured = [summary for part in parts for summary in summaries(part, out, args.seeds)]
    for summary in measured:
        table = new_table(summary.title, ["method"], [*summary.lengths, "seeds", "sequences"])
        for row in _rows(summary):
            table.add_row(*row)
        show(table)
        found += verdicts(summary, args.scale)
    for verdict in found:
        print(f"{verdict.name}: {verdict.claim}: {verdict.outcome} ({verdict.numbers})")
    if not measured:
        print("nothing of it has been measured yet")
        return
    _write(out, measured, found)
    if args.records:
        _write(Path(args.records).parent / out.name, measured, found)


def _write(folder: Path, measured: list[Summary], found: list[Verdict]) -> None:
    """table.md, verdicts.json, each table drawn as SVG and PNG, and overview.md where there are many."""
    import json
    from dataclasses import asdict

    from traformer.experiments.summary import markdown_verdicts
    from traformer.reports.paper_tables import drawn, overview
    from traformer.reports.png import save_png
    from traformer.reports.svg import standalone
    from traformer.storage import make_folder, write_atomically

    make_folder(folder)
    pages = [_markdown(summary, _rows(summary)) for summary in measured]
    write_atomically(folder / "table.md", "\n".join([*pages, markdown_verdicts(found)]))
    write_atomically(folder / "verdicts.json", json.dumps([asdict(verdict) for verdict in found], indent=1) + "\n")
    if len(measured) > MOST_TABLES:
        write_atomically(folder / "overview.md", overview(measured))
    for name, svg in drawn(measured).items():
        write_atomically(folder / f"{name}.svg", standalone(svg, follow_reader=True))
        save_png(svg, folder / f"{name}.png")


def _rows(summary: Summary) -> list[list[str]]:
    rows = []
    for method, by_length in summary.rows.items():
        examples = next(iter(by_length.values()))[0].examples
        cells = [summary.text(method, length) for length in summary.lengths]
        rows.append([method, *cells, str(summary.seeds(method)), f"{examples:,}"])
    chances = [summary.chance(length) for length in summary.lengths]
    if any(chance is not None for chance in chances):
        rows.append(["chance", *("" if chance is None else f"{100 * chance:.0f} %" for chance in chances), "", ""])
    return rows


def _markdown(summary: Summary, rows: list[list[str]]) -> str:
    head = [summary.title, *summary.lengths, "seeds", "sequences"]
    lines = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines) + "\n"


def _cost(scale: str, out: Path) -> None:
    """Time of a training step over RoPE's, beside the paper's ratio; measured once for a folder."""
    import json

    from traformer.benchmarks.train import PAPER, PAPER_WINDOW, measure, show, write_rows

    # sizes, windows, tokens of a step, rounds
    sizes, windows, tokens, rounds = {
        "smoke": (("tiny",), (16,), 64, 1),
        "laptop": (("tiny", "mini"), (256, 4096), 8192, 7),
        "paper": (("tiny", "medium"), (256,), 64 * 256, 20),
    }[scale]
    print(f"\nCost of a training step over RoPE's (scale {scale})")
    file = out / "cost.json"
    if not file.exists():
        out.mkdir(parents=True, exist_ok=True)
        rows: list = []
        for size in sizes:
            for window in windows:
                rows += measure(
                    ("tra", "tra_plus", "rope"), rounds, size=size, window=window, tokens=tokens, vocabulary=257
                )
        write_rows(rows, file)
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    show(rows, 0.0)
    for row in rows:
        paper = PAPER.get(row["size"])
        if row["attention"] != "tra" or row["window"] != PAPER_WINDOW or paper is None or scale == "smoke":
            continue
        outcome = "holds" if row["ratio"] <= paper else "does not hold"
        print(f"{row['size']}: a step of TRA takes at most {paper:.2f} of RoPE's: {outcome} ({row['ratio']:.2f})")
