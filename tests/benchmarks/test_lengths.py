"""`tra bench lengths`: what it prints and writes, and its sentences."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from traformer.cli import main


def test_prints_and_writes_a_row_for_each_task_and_method(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    args = ["--tables", "copy", "--attentions", "tra", "--parts", "2", "--rounds", "1", "--json", str(file)]
    assert main(["bench", "lengths", *args]) == 0
    assert "2 parts" in capsys.readouterr().out
    written = json.loads(file.read_text())
    assert written["about"]["cpu"] and written["about"]["threads"] >= 1
    (row,) = written["rows"]
    assert (row["task"], row["attention"], row["batch"]) == ("copy", "tra", 64)
    assert row["seconds"] > 0 and set(row["ratios"]) == {"2"} and row["ratios"]["2"] > 0


@pytest.mark.parametrize("args", [["--tables", "cope"], ["--attentions", "rop"]])
def test_unknown_names_are_one_sentence(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "lengths", *args]) != 0
    assert "did you mean" in capsys.readouterr().err.lower()
