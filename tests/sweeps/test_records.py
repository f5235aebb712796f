from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.training.tiny import tiny_config
from traformer.cli import main
from traformer.commands.sweep import restore_all
from traformer.errors import InputError
from traformer.experiments import copy_wide
from traformer.runs.folder import RunFolder
from traformer.runs.measurements import ResultStore
from traformer.sweeps.cell import Cell, is_done, is_trained
from traformer.sweeps.local import SweepView, plan, run_sweep
from traformer.sweeps.records import Recording, read_records, record_of, restore, settings_of


def cell(name="a", **changes):
    return Cell(name, tiny_config(**changes), "12,24", 6)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A sweep of one cell, with its file of records."""
    place = tmp_path_factory.mktemp("recorded")
    run_sweep([cell()], place / "runs", jobs=1, view=Recording(place / "cells.jsonl", SweepView()))
    return place


def test_a_recorded_cell_is_done_elsewhere_with_the_same_numbers(recorded, tmp_path):
    records = read_records(recorded / "cells.jsonl")
    assert restore([cell(), cell("b")], records, tmp_path) == ["a"]
    folder, original = RunFolder(tmp_path / "a"), RunFolder(recorded / "runs" / "a")
    assert is_done(cell(), folder) and not is_trained(cell(), folder)
    assert [state.status for state in plan([cell(), cell("b")], tmp_path)] == ["skipped", "waiting"]
    assert [(row["step"], pytest.approx(row["loss"], rel=1e-6)) for row in original.read_metrics()] == [
        (row["step"], row["loss"]) for row in folder.read_metrics()
    ]
    for one, other in zip(original.results.read(), folder.results.read(), strict=True):
        assert (one.split, one.length, one.metric, one.counted) == (
            other.split,
            other.length,
            other.metric,
            other.counted,
        )
        assert other.value == pytest.approx(one.value, rel=1e-6)
    assert record_of(cell(), folder) == records["a"]  # and it can be handed on again


def test_other_settings_do_not_count(recorded, tmp_path):
    records = read_records(recorded / "cells.jsonl")
    others = [cell(lr=0.5), cell(steps=7), Cell("a", tiny_config(), "12,24", 7), Cell("a", tiny_config(), "12", 6)]
    for other in others:
        assert restore([other], records, tmp_path) == []
    # ... where they change what is computed
    assert restore([cell(threads=2, save_every=3)], records, tmp_path) == ["a"]
    # ... but where a text lies on a machine does
    text = {"task": "recall", "task_options": {"data": ["/one/place"], "length": 64}}
    here, there = (cell("t", **{**text, "task_options": {**text["task_options"], "data": [d]}}) for d in ("/a", "/b"))
    line = {"name": "t", "settings": json.loads(json.dumps(settings_of(here)))}
    assert restore([there], {"t": {**line, "losses": [], "shared": {}, "results": []}}, tmp_path) == ["t"]


def test_a_record_has_the_settings_that_the_run_was_made_with(recorded):
    folder = RunFolder(recorded / "runs" / "a")
    assert record_of(cell(lr=0.5, attention="rope"), folder) == read_records(recorded / "cells.jsonl")["a"]


def test_names_of_texts_and_tokenizers_count():
    """Unlike paths: what was measured on one built-in text says nothing about another."""
    options = {"data": ["python-stdlib"], "tokenizer": "bpe:1024", "length": 64}
    kept = settings_of(cell("t", task="text", task_options=options))["config"]["task_options"]
    assert kept["tokenizer"] == "bpe:1024" and kept["data"][0].startswith("python-stdlib-")  # and Python's version
    moved = settings_of(cell("t", task="text", task_options={**options, "data": ["/a"], "tokenizer": "/b"}))
    assert moved["config"]["task_options"] == {"length": 64}


def test_a_folder_that_is_there_is_left_alone(recorded, tmp_path):
    restore([cell()], read_records(recorded / "cells.jsonl"), tmp_path)
    RunFolder(tmp_path / "a").metrics_file.write_text("mine")
    assert restore([cell()], read_records(recorded / "cells.jsonl"), tmp_path) == []
    assert RunFolder(tmp_path / "a").metrics_file.read_text() == "mine"


def test_a_damaged_file_is_one_sentence(tmp_path):
    assert read_records(tmp_path / "none.jsonl") == {}
    good = {"name": "a", "settings": {"config": {}}, "losses": [[1, 0.5]], "shared": {}, "results": []}
    (tmp_path / "good.jsonl").write_text(json.dumps(good) + "\n")
    assert read_records(tmp_path / "good.jsonl") == {"a": good}
    changes = [
        {"losses": [[1]]}, {"losses": [1]}, {"losses": [["1", "2"]]}, {"name": ["a"]}, {"settings": {}}, {"shared": 1},
        {"results": [3]}, {"results": [{"metric": "loss"}]}, {"diverged": 1},
    ]  # fmt: skip
    for content in ("{", "[]", '{"name": "a"}', "[" * 10_000, *(json.dumps({**good, **change}) for change in changes)):
        (tmp_path / "bad.jsonl").write_text(content + "\n")
        with pytest.raises(InputError, match=r"line 1 of .* is no record of a finished cell"):
            read_records(tmp_path / "bad.jsonl")


def test_a_cell_whose_restoring_was_stopped_is_restored_again(recorded, tmp_path, monkeypatch):
    records = read_records(recorded / "cells.jsonl")

    def stops(*arguments):
        raise KeyboardInterrupt

    for name in ("write", "write_config"):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(RunFolder if name == "write_config" else ResultStore, name, stops)
            restore([cell()], records, tmp_path)
        assert not RunFolder(tmp_path / "a").is_run()
    assert restore([cell()], records, tmp_path) == ["a"] and is_done(cell(), RunFolder(tmp_path / "a"))


def test_two_sweeps_add_to_one_file(recorded, tmp_path):
    record = next(iter(read_records(recorded / "cells.jsonl").values()))
    first, second = (Recording(tmp_path / "cells.jsonl", SweepView()) for _ in range(2))
    first.add({**record, "name": "a1"})
    second.add({**record, "name": "b1"})
    first.add({**record, "name": "a2"})
    assert set(read_records(tmp_path / "cells.jsonl")) == {"a1", "a2", "b1"}


def test_records_that_cannot_be_written_are_refused_before_the_first_cell(tmp_path, capsys):
    experiment = tmp_path / "one.py"
    experiment.write_text("from tests.sweeps.test_records import cell\ndef cells():\n    return [cell()]\n")
    (tmp_path / "file").write_text("")
    for records in (tmp_path, tmp_path / "file" / "records.jsonl"):
        for more in ([], ["--show"]):
            command = ["sweep", str(experiment), "--out", str(tmp_path / "runs"), "--records", str(records), *more]
            assert main(command) == 2
            assert capsys.readouterr().err.count("\n") == 1 and not (tmp_path / "runs").exists()


def test_the_command_takes_and_adds_records(recorded, tmp_path, capsys):
    experiment = tmp_path / "two.py"
    experiment.write_text(
        "from tests.sweeps.test_records import cell\ndef cells():\n    return [cell(), cell('b', seed=3)]\n"
    )
    records = tmp_path / "cells.jsonl"
    records.write_text((recorded / "cells.jsonl").read_text())
    assert main(["sweep", str(experiment), "--out", str(tmp_path / "runs"), "--records", str(records)]) == 0
    assert "a: skipped" in capsys.readouterr().err
    assert set(read_records(records)) == {"a", "b"}
    assert main(["reproduce", "copy", "--scale", "smoke", "--records", str(records)]) == 2


def test_show_reports_what_is_recorded_and_runs_nothing(recorded, tmp_path, capsys):
    """Later waves are shown, too, while cells of earlier ones are missing."""
    experiment = tmp_path / "waves.py"
    experiment.write_text(
        "from tests.sweeps.test_records import cell\n"
        "WAVES = [[cell('early', seed=3)], [cell()]]\n"
        "def cells():\n    return WAVES[0]\n"
        "def next_cells(out, failed):\n"
        "    left = [[c for c in wave if c.name not in failed and not (out / c.name).exists()] for wave in WAVES]\n"
        "    return next((wave for wave in left if wave), [])\n"
    )
    records, out = str(recorded / "cells.jsonl"), tmp_path / "runs"
    command = ["sweep", str(experiment), "--out", str(out), "--show"]
    assert main([*command, "--records", records]) == 0
    assert (out / "a").is_dir() and not (out / "early").exists()
    assert "report.html" in capsys.readouterr().out and (out / "report.html").exists()
    none_of_it = ["sweep", "copy_batch", "--out", str(tmp_path / "other"), "--show", "--records", records]
    for wrong, words in (
        (none_of_it, "no cell in"),
        ([*command, "--jobs", "2"], "leave out --jobs"),
        ([*command, "--records", str(tmp_path / "none.jsonl")], "no file"),
        (["reproduce", "copy", "--scale", "laptop", "--show", "--records", str(tmp_path / "none.jsonl")], "no file"),
    ):
        assert main(wrong) == 2
        assert words in capsys.readouterr().err


def test_what_is_shown_of_a_search_is_what_is_committed(tmp_path):
    """Rates are chosen from the recorded searches alone, so every table's cell is found, and the verdicts agree."""
    results = Path(__file__).parents[2] / "results" / "copy_wide"
    restore_all(copy_wide.cells(), str(tmp_path), str(results / "records.jsonl"), copy_wide.next_cells)
    found = [asdict(verdict) for verdict in copy_wide.verdicts(tmp_path)]
    assert found == json.loads((results / "verdicts.json").read_text(encoding="utf-8"))
