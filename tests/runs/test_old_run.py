"""A run folder of the first version of the layout still opens: it is measured, reported and resumed as it was then.

run_of_0_1/ was written by commit f26aaf0 with `tra train` (copy to 4 symbols, tra_plus, two layers of 16, 8 steps),
`tra eval` and `tra diagnose`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from traformer.cli import main

OLD = Path(__file__).parent / "run_of_0_1"


@pytest.fixture
def run(tmp_path) -> Path:
    return Path(shutil.copytree(OLD, tmp_path / OLD.name))


def values(run: Path) -> dict[tuple[int, str], float]:
    rows = json.loads((run / "results.json").read_text(encoding="utf-8"))
    return {(row["length"], row["metric"]): row["value"] for row in rows if row["split"] == "test"}


def test_it_is_measured_as_it_was(run):
    before = values(run)
    assert main(["eval", str(run), "--lengths", "4,8", "--examples", "8", "--again", "--device", "cpu"]) == 0
    after = values(run)
    assert len(before) == 4 and {key: after[key] for key in before} == before


def test_what_it_measured_is_reported(run, capsys):
    assert main(["report", str(run)]) == 0
    assert "Copy, trained to 4" in capsys.readouterr().out
    report = (run / "report.md").read_text(encoding="utf-8")
    assert "tra_plus" in report and "residue" in report  # diagnosis.json is part of the store


def test_it_resumes_where_it_was(run):
    losses = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    shutil.rmtree(run / "checkpoints" / "step-8")
    assert main(["train", "--resume", "--out", str(run)]) == 0
    again = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in again] == [2, 4, 6, 8]
    assert [line["loss"] for line in again] == pytest.approx(losses, rel=1e-4)
