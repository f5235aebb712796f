"""Python code in README.md and docs/ does what it says: each document's blocks are run in order.

A block is marked `python run`. One that another test runs names it, `python tested by tests/...`, and one that cannot
be run says why, `python not run: needs a GPU`.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python run\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OPENING = re.compile(r"^```[ ]*py.*$", re.MULTILINE)
MARK = re.compile(r"```python (run|tested by tests/\S+|not run: .+)")


def blocks(document: Path) -> list[tuple[int, str]]:
    """The line each block starts on, and its code."""
    text = document.read_text(encoding="utf-8")
    return [(text[: found.start(1)].count("\n"), found[1]) for found in BLOCK.finditer(text)]


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if blocks(d)], ids=lambda document: document.stem)
def test_blocks_run(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # what a block saves goes there
    names: dict[str, object] = {"__name__": "__main__"}
    for line, code in blocks(document):
        exec(compile("\n" * line + code, str(document), "exec"), names)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.stem)
def test_every_block_of_python_is_marked(document):
    openings = OPENING.findall(document.read_text(encoding="utf-8"))
    assert [line for line in openings if not MARK.fullmatch(line)] == []


@pytest.mark.parametrize("document", [*DOCUMENTS, ROOT / "CHANGELOG.md"], ids=lambda document: document.stem)
def test_no_merge_was_left_half_done(document):
    assert not re.findall(r"^(?:<{7} .*|>{7} .*|={7})$", document.read_text(encoding="utf-8"), re.MULTILINE)


def test_there_are_blocks():
    assert len(blocks(ROOT / "README.md")) >= 2
    assert any(blocks(document) for document in DOCUMENTS[1:])
