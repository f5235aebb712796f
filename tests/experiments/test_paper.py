"""The paper's tables: every cell can be built at every scale, and `tra reproduce all --scale smoke` runs, twice."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from traformer.cli import main
from traformer.errors import InputError
from traformer.experiments.paper import SCALES, TABLE_NAMES, TABLES, parts_of
from traformer.experiments.paper_results import summaries, verdicts
from traformer.experiments.protocol import FAILS, HOLDS
from traformer.models.from_run import build_model_config
from traformer.runs.folder import RunFolder
from traformer.runs.measurements import Measurement
from traformer.tasks import build_task

KEPT = Path(__file__).parents[2] / "results" / "reproduce-laptop"


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("table", [name for name in TABLES if name != "text"])  # GPT-2's files are not at hand here
def test_every_cell_can_be_built(table, scale):
    names = []
    for part in parts_of(table, scale):
        for cell in part.cells():
            names.append(cell.name)
            task = build_task(cell.config.task, cell.config.task_options)
            build_model_config(cell.config, task)
            splits = task.test_splits(cell.lengths)
            assert max(split.size for split in splits) > task.length_range[1]
    assert len(set(names)) == len(names)


def test_scales_are_what_the_paper_publishes():
    (part,) = parts_of("flip_flop", "paper")
    assert (part.config.preset, part.config.steps, part.config.batch_size, part.config.lr) == ("mini", 25_000, 64, 1e-4)
    assert part.config.task_options == {"length": 512} and set(part.methods.values()) == {4}
    for table in ("copy", "induction", "instructions"):
        for part in parts_of(table, "paper"):
            assert part.config.steps * part.config.batch_size == 4_000_000
            assert part.config.task_options["max_length"] == 50
    (part,) = parts_of("text", "paper")
    assert (part.config.preset, part.config.steps) == ("medium", 100_000)
    assert parts_of("flip_flop", "laptop")[0].examples >= 2000


def test_seeds_given_take_the_place_of_the_tables_own():
    (part,) = parts_of("flip_flop", "laptop")
    assert len(part.cells()) == 14 and len(part.cells(seeds=1)) == 4
    assert [cell.config.seed for cell in part.cells()][:4] == [0, 0, 0, 0]  # whole columns first


def test_reproduce_everything_as_smoke_and_again(tmp_path, capsys, monkeypatch):
    assert main(["reproduce", "all", "--scale", "smoke", "--out", str(tmp_path)]) == 0
    first = capsys.readouterr().out
    assert "holds" not in first.replace("does not hold", "holds")  # a smoke run shows nothing
    for name in TABLES:
        assert TABLES[name].title in first and (tmp_path / name / "table.md").exists()
    assert "not tested at this scale" in (tmp_path / "copy" / "table.md").read_text()
    assert "chance" in (tmp_path / "flip_flop" / "table.md").read_text()
    short = (tmp_path / "algorithmic" / "overview.md").read_text().splitlines()
    assert short[0] == "| exact match in % at 4, 16 | `tra` | chance |" and "| modular arithmetic |" in short[5]
    assert not (tmp_path / "copy" / "overview.md").exists()
    for picture in ("copy/copy_unique", "flip_flop/flip_flop-sparse", "text/text"):
        assert "</svg>" in (tmp_path / f"{picture}.svg").read_text(), picture
        assert (tmp_path / f"{picture}.png").stat().st_size > 1000

    def refuse(*args, **more):
        raise AssertionError("what is done is not done again")

    monkeypatch.setattr("traformer.training.loop.train", refuse)
    monkeypatch.setattr("traformer.evaluation.by_length.measure", refuse)
    for name in TABLE_NAMES:
        if name != "text":
            assert main(["reproduce", name, "--scale", "smoke", "--out", str(tmp_path)]) == 0
    again = capsys.readouterr().out
    lines = [line for line in again.splitlines() if "not tested" in line]
    assert lines and all(line in first.splitlines() for line in lines)


def test_show_runs_nothing(tmp_path, capsys):
    assert main(["reproduce", "copy", "--scale", "laptop", "--out", str(tmp_path / "runs"), "--show"]) == 0
    assert "nothing of it has been measured yet" in capsys.readouterr().out
    assert not list(tmp_path.rglob("config.yaml")) and not list(tmp_path.rglob("table.md"))


@pytest.mark.parametrize("table", sorted(path.name for path in KEPT.iterdir() if path.is_dir()))
def test_committed_tables_are_those_of_the_committed_records(table, tmp_path, capsys):
    records = tmp_path / "results" / "records.jsonl"
    records.parent.mkdir()
    shutil.copy(KEPT / "records.jsonl", records)
    command = ["reproduce", table, "--scale", "laptop", "--out", str(tmp_path / "runs"), "--records", str(records)]
    assert main([*command, "--show"]) == 0
    names = sorted(path.name for path in (KEPT / table).iterdir() if path.suffix != ".png")
    assert names == sorted(path.name for path in (records.parent / table).iterdir() if path.suffix != ".png")
    for name in names:
        made, kept = (path.read_text(encoding="utf-8") for path in (records.parent / table / name, KEPT / table / name))
        assert made == kept, f"{name} is not what its records say; make it again with {' '.join(command)} --show"
    assert records.read_bytes() == (KEPT / "records.jsonl").read_bytes()


def test_verdicts_from_runs(tmp_path):
    (part,) = parts_of("induction", "laptop")
    values = {
        "tra_plus": {"2-50": 1.0, "51-100": 0.9, "151-200": 0.9},
        "rope": {"2-50": 1.0, "51-100": 0.5, "151-200": 0.1},
    }
    for cell in part.cells(seeds=2):
        folder = RunFolder(tmp_path / cell.name)
        if cell.config.attention not in values:
            continue
        folder.write_config(cell.config, {})
        folder.results.write(
            [
                Measurement(
                    "induction",
                    "test",
                    length,
                    "exact_match",
                    value,
                    None,
                    None,
                    512,
                    cell.config.seed,
                    cell.config.attention,
                    part.config.steps,
                    50,
                )
                for length, value in values[cell.config.attention].items()
            ]
        )
    (summary,) = summaries(part, tmp_path, 2)
    assert summary.lengths == ["2-50", "51-100", "151-200"] and summary.seeds("rope") == 2
    longer, cut, each = verdicts(summary, "laptop")
    assert each.outcome == FAILS and "90.0 % at 100" in each.numbers
    assert (
        (longer.outcome, cut.outcome) == (FAILS, HOLDS)
        and "1x of 4x" in longer.numbers
        and "80 % at 100" in cut.numbers
    )


def test_wrong_names():
    with pytest.raises(InputError, match="flip_flop"):
        parts_of("flipflop", "smoke")
    assert main(["reproduce", "nothing", "--scale", "smoke"]) == 2
    assert main(["reproduce", "copy", "--scale", "smoke", "--ray", "local", "--jobs", "2"]) == 2


@pytest.mark.slow
def test_a_table_that_was_killed_has_the_same_numbers_after(tmp_path):
    """kill -9 as soon as the second cell has begun; the same command then finishes the table."""

    def command(out):
        return [sys.executable, "-m", "traformer", "reproduce", "copy", "--scale", "smoke", "--out", str(out)]

    subprocess.run(command(tmp_path / "whole"), check=True, capture_output=True)
    process = subprocess.Popen(command(tmp_path / "killed"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while len(list((tmp_path / "killed").glob("copy/*/config.yaml"))) < 2 and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.kill()
    process.wait()
    assert not (tmp_path / "killed" / "copy" / "table.md").exists()
    subprocess.run(command(tmp_path / "killed"), check=True, capture_output=True)
    for name in ("table.md", "verdicts.json"):
        assert (tmp_path / "killed" / "copy" / name).read_text() == (tmp_path / "whole" / "copy" / name).read_text()
