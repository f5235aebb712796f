"""The laptop tables of `tra reproduce` in pages: a table whole, or the digest that README has.

    python -m traformer.reports.paper_pages results/reproduce-laptop docs/paper_tables.md README.md

fills what is between `<!-- laptop: NAME -->` and `<!-- end -->` from the files that `--records` leaves beside the
records. NAME is a table (its overview where it has one) or `digest`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

from traformer.errors import TraformerError
from traformer.storage import write_atomically

# Columns of the digest: its head, the table, the part of it, the length.
DIGEST = (
    ("flip-flop, sparse, 2,048", "flip_flop", "flip_flop, sparse", "2048"),
    ("induction 51–100", "induction", "induction", "51-100"),
    ("induction 251–300", "induction", "induction", "251-300"),
    ("copy 51–100", "copy", "copy_unique", "51-100"),
    ("copy 151–200", "copy", "copy_unique", "151-200"),
    ("copy 251–300", "copy", "copy_unique", "251-300"),
)
CHANCE = "chance"

Rows = dict[str, dict[str, str]]  # method -> column -> cell


def parts_of_table(text: str) -> dict[str, Rows]:
    """Every table of a table.md, by its title."""
    found: dict[str, Rows] = {}
    for block in text.strip().split("\n\n"):
        head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines())
        found[head[0]] = {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}
    return found


def digest(results: Path) -> str:
    """One row per method over several tables, the best copier first; the last column counts the seeds of each table."""
    tables = {table: parts_of_table(_read(results / table / "table.md")) for _, table, _, _ in DIGEST}
    parts = {part: tables[table][f"{part}: exact match"] for _, table, part, _ in DIGEST}
    methods = sorted(
        dict.fromkeys(name for rows in parts.values() for name in rows), key=lambda name: _order(name, parts)
    )
    lines = [f"| | {' | '.join(head for head, _, _, _ in DIGEST)} | seeds |", "|---" * (len(DIGEST) + 2) + "|"]
    for name in methods:
        cells = [parts[part].get(name, {}).get(length, "") for _, _, part, length in DIGEST]
        seeds = ", ".join(rows.get(name, {}).get("seeds", "–") for rows in parts.values())
        shown = name if name == CHANCE else f"`{name}`"
        lines.append("| " + " | ".join([shown, *cells, "" if name == CHANCE else seeds]) + " |")
    return "\n".join(lines) + "\n"


def _order(name: str, parts: Mapping[str, Rows]) -> tuple[bool, list[int]]:
    """Chance last; otherwise by what a method copies at the last length, then at shorter ones."""
    cells = list(parts["copy_unique"].get(name, {}).items())
    shares = [
        -int(cell.split()[0]) for length, cell in reversed(cells) if cell and length not in ("seeds", "sequences")
    ]
    return name == CHANCE, shares


def filled(page: str, results: Path) -> str:
    """The page's text with every laptop table as it is in `results`."""

    def fill(found: re.Match[str]) -> str:
        name = found[1]
        if name == "digest":
            text = digest(results)
        else:
            overview = results / name / "overview.md"
            text = _read(overview if overview.exists() else results / name / "table.md")
        return f"<!-- laptop: {name} -->\n{text.strip()}\n<!-- end -->"

    return re.sub(r"<!-- laptop: (\w+) -->\n.*?<!-- end -->", fill, page, flags=re.DOTALL)


def _read(file: Path) -> str:
    if not file.exists():
        raise TraformerError(f"there is no {file}; `tra reproduce TABLE --records FILE --show` writes it beside FILE")
    return file.read_text(encoding="utf-8")


def main(argv: list[str]) -> int:
    if len(argv) < 2:
        print("usage: python -m traformer.reports.paper_pages RESULTS PAGE...", file=sys.stderr)
        return 2
    try:
        for page in map(Path, argv[1:]):
            write_atomically(page, filled(_read(page), Path(argv[0])))
    except TraformerError as error:
        print(f"tra: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
