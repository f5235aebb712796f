"""The small files that a table rests on, from a sweep under a protocol: counts, rates, verdicts and the table itself.

    python -m traformer.experiments.summary what_works runs/what_works results/what_works docs/evidence_parts.md

writes cells.csv (right answers for every arm, seed, split and length), rates.csv (every rate tried, with its loss),
verdicts.json, table.md and verdicts.md; and, if a page is named, puts the last two between its lines
`<!-- what_works -->` and `<!-- end -->`.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from io import StringIO
from pathlib import Path

from traformer.errors import TraformerError
from traformer.experiments.protocol import Place, Protocol, Table, Verdict
from traformer.storage import write_atomically

_SPLITS = {"iid": 0, "sparse": 1, "dense": 2}  # their order in a table


def write_summary(protocol: Protocol, out: str | Path, folder: str | Path) -> None:
    out, folder = Path(out), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    counts = [("setting", "arm", "split", "length", "seed", "right", "examples", "chance")]
    for setting, arm, seed, row in protocol.rows(out):
        chance = "" if row.chance is None else f"{row.chance:.6g}"
        counts.append((setting, arm.name, row.split, str(row.length), str(seed), f"{protocol.right(row):g}",
                       str(protocol.examples), chance))  # fmt: skip
    verdicts = protocol.verdicts(out)
    write_atomically(folder / "cells.csv", csv_text(counts))
    write_atomically(folder / "table.md", markdown_table(protocol, protocol.table(out)))
    write_rates(protocol, out, folder)
    write_verdicts(verdicts, folder)


def write_rates(protocol: Protocol, out: Path, folder: Path) -> None:
    """Every rate that was tried, with its loss at the end of training."""
    rates = [("setting", "arm", "rate", "loss", "chosen")]
    for setting, wave in protocol.waves:
        for arm in wave:
            search = protocol.search(out, setting, arm)
            for rate, loss in sorted(search.losses.items()):
                rates.append((setting, arm.name, f"{rate:g}", f"{loss:.6g}", "yes" if rate == search.rate else ""))
    write_atomically(folder / "rates.csv", csv_text(rates))


def write_verdicts(verdicts: Sequence[Verdict], folder: Path) -> None:
    write_atomically(folder / "verdicts.json", json.dumps([asdict(v) for v in verdicts], indent=1) + "\n")
    write_atomically(folder / "verdicts.md", markdown_verdicts(verdicts))


def write_picture(svg: str, file: Path) -> None:
    """A figure as `file`.svg, which follows the reader's dark mode, and as `file`.png."""
    from traformer.reports.png import save_png
    from traformer.reports.svg import standalone

    write_atomically(file.with_suffix(".svg"), standalone(svg, follow_reader=True))
    save_png(svg, file.with_suffix(".png"))


def fill_page(page: str | Path, experiment: str, folder: str | Path) -> None:
    """Replace what the page has of an experiment by its table and verdicts as they are in `folder`."""
    page, folder = Path(page), Path(folder)
    text = page.read_text(encoding="utf-8")
    before, start, rest = text.partition(f"<!-- {experiment} -->\n")
    _, end, after = rest.partition("<!-- end -->")
    if not (start and end):
        raise TraformerError(f"{page} has no lines <!-- {experiment} --> and <!-- end --> to write between")
    files = [folder / "table.md", folder / "verdicts.md"]  # trials that compare nothing have no verdicts
    parts = [file.read_text(encoding="utf-8") for file in files if file.exists()]
    write_atomically(page, before + start + "\n".join(parts) + end + after)


def markdown_table(protocol: Protocol, table: Table) -> str:
    """One table for each setting: a line for each arm, mean (worst to best seed) at every split and length."""
    parts = []
    for setting in dict.fromkeys(setting for setting, _ in protocol.waves):
        places = sorted(
            {place for _, place in table if place.setting == setting},
            key=lambda place: (place.length, _SPLITS.get(place.split, 0), place.split),
        )
        if not places:
            continue
        head = ["" if place.split == "test" else f"{place.split} " for place in places]
        lines = [
            "| "
            + " | ".join([setting, *(f"{h}{place.length}" for h, place in zip(head, places, strict=True))])
            + " | seeds |"
        ]
        lines.append("|---" * (len(places) + 2) + "|")
        chances: dict[Place, float | None] = {}
        for name in dict.fromkeys(arm.name for other, wave in protocol.waves if other == setting for arm in wave):
            found = {place: table[name, place] for place in places if (name, place) in table}
            if not found:
                continue
            chances.update({place: counts.chance for place, counts in found.items()})
            cells = [_share(found[place]) if place in found else "" for place in places]
            seeds = max(len(counts.right) for counts in found.values())
            lines.append("| " + " | ".join([f"`{name}`", *cells, str(seeds)]) + " |")
        known = [chances.get(place) for place in places]
        lines.append(
            "| " + " | ".join(["chance", *("" if c is None else f"{100 * c:.0f} %" for c in known), ""]) + " |"
        )
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _share(counts: object) -> str:
    mean, worst, best = (100 * getattr(counts, name) for name in ("mean", "worst", "best"))
    return f"{mean:.0f} %" if f"{worst:.0f}" == f"{best:.0f}" else f"{mean:.0f} % ({worst:.0f}–{best:.0f})"


def markdown_verdicts(verdicts: Sequence[Verdict]) -> str:
    lines = ["| | hypothesis | verdict | numbers |", "|---|---|---|---|"]
    lines += [f"| {v.name} | {v.claim} | **{v.outcome}** | {v.numbers} |" for v in verdicts]
    return "\n".join(lines) + "\n"


def csv_text(rows: Sequence[Sequence[str]]) -> str:
    text = StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def main(argv: list[str]) -> int:
    from traformer.sweeps.find import find_experiment

    if len(argv) not in (3, 4):
        print("usage: python -m traformer.experiments.summary EXPERIMENT SWEEP RESULTS [PAGE]", file=sys.stderr)
        return 2
    try:
        module = find_experiment(argv[0])
        # An experiment whose numbers are no counts of right answers, or that has no protocol, writes its own files.
        write = getattr(module, "write_summary", None)
        if write is None:
            if not hasattr(module, "PROTOCOL"):
                raise TraformerError(
                    f"experiment {argv[0]} has no PROTOCOL; summaries are for experiments that declare one"
                )
            write = partial(write_summary, module.PROTOCOL)
        write(Path(argv[1]), Path(argv[2]))
        if len(argv) == 4:
            fill_page(argv[3], argv[0], argv[2])
    except TraformerError as error:
        print(f"tra: error: {error}", file=sys.stderr)
        return 2
    print(f"written to {argv[2]}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
