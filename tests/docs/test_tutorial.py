"""The tutorial notebook runs from top to bottom, and what it says of its results is so."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import notebook as notebooks  # noqa: E402  (docs/notebook.py)

TUTORIAL = ROOT / "docs" / "tutorial.ipynb"


def test_every_cell_runs(tmp_path: Path) -> None:
    outputs = notebooks.run(
        notebooks.read(TUTORIAL), tmp_path, {"STEPS = 400": "STEPS = 2", "examples=128": "examples=4"}
    )
    assert sum("256 tokens" in text for text in outputs) == 2
    assert {path.name for path in (tmp_path / "runs" / "tutorial").iterdir()} == {"tra", "rope"}


@pytest.mark.slow
def test_its_results_are_those_it_speaks_of(tmp_path: Path) -> None:
    check_results(notebooks.run(notebooks.read(TUTORIAL), tmp_path))


def test_the_committed_outputs_are_those_it_speaks_of() -> None:
    check_results(
        ["".join("".join(one["text"]) for one in cell["outputs"]) for cell in notebooks.read(TUTORIAL)["cells"]
         if cell["cell_type"] == "code"]
    )  # fmt: skip


def check_results(outputs: list[str]) -> None:
    """TRA stays right and RoPE does not; the deciding key keeps its weight under TRA alone."""
    shares, weights = (re.findall(r"256 tokens:\s+([\d.]+)", text) for text in outputs if "256 tokens" in text)
    assert float(shares[0]) >= 95 and float(shares[1]) <= 30
    assert float(weights[0]) > 2 * float(weights[1])


def test_its_outputs_are_small_and_only_text() -> None:
    assert TUTORIAL.stat().st_size < 50_000
    for cell in notebooks.read(TUTORIAL)["cells"]:
        assert all(output["output_type"] == "stream" for output in cell.get("outputs", []))


def test_a_change_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must occur once"):
        notebooks.run(notebooks.read(TUTORIAL), tmp_path, {"NOWHERE": ""})


def test_jupyter_can_open_it() -> None:
    """What the format asks for: ids that differ, known cell types, version 4."""
    found = json.loads(TUTORIAL.read_text(encoding="utf-8"))
    ids = [cell["id"] for cell in found["cells"]]
    assert found["nbformat"] == 4 and len(set(ids)) == len(ids)
    assert {cell["cell_type"] for cell in found["cells"]} == {"markdown", "code"}
