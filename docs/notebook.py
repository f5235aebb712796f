"""Notebooks without Jupyter: runs one from top to bottom, stores its text outputs, and makes a page of it.

`python docs/notebook.py docs/tutorial.ipynb` runs it in a temporary folder and stores what its cells print. Pages that
a cell shows (HTML) are made and left out of the file.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def source_of(cell: Mapping[str, Any]) -> str:
    """A cell's text; the format allows a list of lines."""
    return "".join(cell["source"])


def run(notebook: Mapping[str, Any], folder: Path, changes: Mapping[str, str] | None = None) -> list[str]:
    """Run every code cell in `folder`; returns what each prints and, of its last value, the text.

    `changes` are texts to replace, each of which must occur once: a test may ask for fewer steps.
    """
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    codes = [source_of(cell) for cell in cells]
    for old, new in (changes or {}).items():
        if sum(code.count(old) for code in codes) != 1:
            raise ValueError(f"{old!r} must occur once in the notebook")
        codes = [code.replace(old, new) for code in codes]
    names: dict[str, Any] = {"__name__": "__main__"}
    outputs = []
    with contextlib.chdir(folder):
        for number, code in enumerate(codes):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                value = _run_cell(code, f"cell {number}", names)
            text = printed.getvalue()
            if hasattr(value, "_repr_html_"):
                value._repr_html_()  # what Jupyter would show
            elif value is not None:
                text += f"{value!r}\n"
            outputs.append(text)
    return outputs


def _run_cell(code: str, name: str, names: dict[str, Any]) -> Any:
    """Run a cell; the value of its last line, if that is an expression."""
    tree = ast.parse(code, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), name, "eval"), names)


def with_outputs(notebook: dict[str, Any], outputs: list[str]) -> dict[str, Any]:
    """The same notebook with these text outputs."""
    remaining = iter(outputs)
    cells = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            text = next(remaining)
            stream = {"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}
            cell = {**cell, "outputs": [stream] if text else [], "execution_count": None}
        cells.append(cell)
    return {**notebook, "cells": cells}


def markdown_page(notebook: Mapping[str, Any], name: str) -> str:
    """The notebook as Markdown: texts, code, and what the code printed."""
    parts = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            parts.append(source_of(cell))
            continue
        parts.append(f"```python\n{source_of(cell)}\n```")
        printed = "".join("".join(output.get("text", "")) for output in cell["outputs"])
        if printed:
            parts.append(f"```text\n{printed.rstrip()}\n```")
    parts.append(f"This page is a notebook: [{name}]({name}).")
    return "\n\n".join(parts) + "\n"


def read(path: Path) -> dict[str, Any]:
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return notebook


def main(arguments: list[str]) -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    for name in arguments:
        path = Path(name)
        notebook = read(path)
        with tempfile.TemporaryDirectory() as folder:
            outputs = run(notebook, Path(folder))
        path.write_text(json.dumps(with_outputs(notebook, outputs), indent=1, ensure_ascii=False) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
