"""`tra bench attention` and `tra bench decode` on problems of a moment."""

from __future__ import annotations

import json

import pytest

from traformer.benchmarks import attention
from traformer.cli import main


def test_names_the_machine_and_compares_decays(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(attention, "DENORMAL_SHAPE", (1, 1, 64))
    monkeypatch.setitem(attention.SHAPES, 64, (1, 2))
    rows, table = tmp_path / "rows.json", tmp_path / "table.md"
    command = ["bench", "attention", "--lengths", "64", "--rounds", "3", "--json", str(rows), "--markdown", str(table)]
    assert main(command) == 0
    about = json.loads(rows.read_text())["about"]
    assert about["cpu"] == attention.cpu_model() != ""
    assert {"kernel", "denormals", "threads"} <= about.keys()
    assert attention.machine_line(about) in table.read_text() and attention.cpu_model() in capsys.readouterr().out
    compared = [row for row in json.loads(rows.read_text())["rows"] if row["benchmark"] == "denormals"]
    assert [row["pass"] for row in compared] == ["forward", "both"]
    assert all(row["ratio"] > 0 for row in compared) and "init over long" in table.read_text()


def test_decode_writes_its_table(tmp_path):
    table = tmp_path / "table.md"
    command = ["bench", "decode", "--contexts", "64", "--rounds", "3", "--heads", "1", "--markdown", str(table)]
    assert main(command) == 0
    assert attention.cpu_model() in table.read_text() and "| 64 | long |" in table.read_text()


def test_decays_of_a_run_need_the_run(capsys):
    assert main(["bench", "attention", "--decays", "run"]) != 0
    assert "add --run DIR" in capsys.readouterr().err


def test_a_run_brings_its_decays(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(
        attention, "from_run", lambda folder, length: asked.append(length) or attention.draw(1, 1, length, 8, "init")
    )
    monkeypatch.setattr(attention, "measure", lambda *args, **options: [])
    assert main(["bench", "attention", "--run", str(tmp_path), "--lengths", "64"]) == 0
    assert asked == [64]
    with pytest.raises(SystemExit):
        main(["bench", "attention", "--rounds", "0"])
