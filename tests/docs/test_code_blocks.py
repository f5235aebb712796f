"""Code blocks of the documents that are marked `python run` do what they say: each document's are run in order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCUMENTS = sorted((Path(__file__).resolve().parents[2] / "docs").glob("*.md"))
BLOCK = re.compile(r"^```python run\n(.*?)^```$", re.MULTILINE | re.DOTALL)


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


def test_there_are_blocks():
    assert any(blocks(document) for document in DOCUMENTS)
