from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from io import StringIO

import pytest
import torch
from rich.console import Console

from tests.reports.made import make_run
from tests.training.test_loop import assert_same_run
from tests.training.tiny import tiny_config
from traformer.cli import main
from traformer.errors import InputError
from traformer.experiments import demo
from traformer.runs.folder import RunFolder
from traformer.sweeps import local
from traformer.sweeps.cell import Cell, is_done, is_trained, run_cell
from traformer.sweeps.find import experiment_cells, find_experiment
from traformer.sweeps.local import SweepView, plan, run_sweep
from traformer.sweeps.overview import Overview, duration, time_left
from traformer.sweeps.records import Recording
from traformer.training.loop import train


def cell(name="a", **changes):
    return Cell(name, tiny_config(**changes), "12,24", 6)


def test_cell_survives_json():
    one = cell(task_options={"length": 12, "p_ignore": 0.5}, clip=1.0)
    assert Cell.from_dict(one.to_dict()) == one


def test_cell_goes_on_from_wherever_it_is(tmp_path):
    one = cell()
    folder = RunFolder(tmp_path / "a")
    assert not is_done(one, folder)
    train(one.config, folder.path, quiet=True)
    assert not is_done(one, folder)
    rows = run_cell(one, folder.path, quiet=True)
    assert len(rows) == 18 and is_done(one, folder)
    assert not is_done(Cell("a", one.config, "12,24,48", 6), folder)
    assert not is_done(Cell("a", one.config, "12,24", 7), folder)


def test_plan_fails_a_bad_cell_and_keeps_the_others(tmp_path):
    states = plan([cell("a"), cell("b", attention="rop"), cell("c", task_options={"lenght": 1})], tmp_path)
    assert [state.status for state in states] == ["waiting", "failed", "failed"]
    assert "did you mean 'rope'" in states[1].message
    with pytest.raises(InputError, match="two cells of the sweep are named 'a'"):
        plan([cell("a"), cell("a")], tmp_path)


def test_a_cell_on_a_gpu_takes_no_more_of_the_machine_than_its_process(tmp_path, monkeypatch):
    cells = [cell("a", device="cpu"), cell("b", device="auto"), cell("c", device="cuda:1")]
    for gpu in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        memory = [state.memory - local.PROCESS_MEMORY for state in plan(cells, tmp_path)]
        assert memory[0] > 0 and memory[1] == (0 if gpu else memory[0]) and memory[2] == 0


def test_sweep_runs_skips_and_survives_a_failing_cell(tmp_path):
    # A cell whose folder was made with other settings fails in its own process; the other one is done all the same.
    train(tiny_config(steps=2, seed=5), tmp_path / "clash", quiet=True)
    cells = [cell("clash"), cell("good")]
    states = run_sweep(cells, tmp_path, jobs=2)
    assert [state.status for state in states] == ["failed", "done"]
    assert "was started with" in states[0].message and "delete" in states[0].message
    before = (tmp_path / "good" / "results.json").stat().st_mtime_ns
    again = run_sweep([cell("good")], tmp_path)
    assert again[0].status == "skipped"
    assert (tmp_path / "good" / "results.json").stat().st_mtime_ns == before


def test_a_finished_run_of_other_settings_is_not_taken_for_the_cell(tmp_path):
    first = cell()
    run_cell(first, tmp_path / "a", quiet=True)
    assert is_done(cell(threads=2, keep=1), RunFolder(tmp_path / "a"))  # these change nothing of what is computed
    for edited in (cell(lr=0.5), cell(attention="rope"), cell(seed=4)):
        assert not is_done(edited, RunFolder(tmp_path / "a"))
    records = tmp_path / "records.jsonl"
    (state,) = run_sweep([cell(lr=0.5, attention="rope")], tmp_path, view=Recording(records, SweepView()))
    assert state.status == "failed" and "was started with attention = 'tra', not 'rope'" in state.message
    assert f"or delete {tmp_path / 'a'}" in state.message and not records.exists()


def test_a_cell_that_ends_well_without_its_measurements_has_failed(tmp_path, monkeypatch):
    """Else a sweep that asks for what is left would run it again and again."""
    monkeypatch.setattr(local, "PROGRAM", "tests.sweeps.does_nothing")
    (state,) = run_sweep([cell("deep/a")], tmp_path)
    assert state.status == "failed" and "nothing was measured at iid 12, " in state.message
    assert (tmp_path / "logs" / "deep" / "a.log").read_text() == "nothing is done\n"


def test_a_cell_whose_process_is_killed_again_and_again(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "PROGRAM", "tests.sweeps.kills_itself")
    monkeypatch.setattr(local, "KILLED_RETRIES", 1)
    (state,) = run_sweep([cell()], tmp_path)
    assert (state.status, state.message, state.attempts) == ("failed", "its process was killed (signal 9)", 2)


def test_a_run_is_trained_if_its_newest_whole_checkpoint_is_the_last(tmp_path):
    one, folder = cell(), RunFolder(tmp_path / "a")
    train(one.config, folder.path, quiet=True)
    assert is_trained(one, folder)
    (folder.checkpoints / "step-12" / "model.safetensors").write_bytes(b"damaged")
    assert not is_trained(one, folder)
    run_cell(one, folder.path, quiet=True)
    assert is_trained(one, folder) and is_done(one, folder)


def test_lengths_that_a_text_does_not_reach_are_not_waited_for(tmp_path):
    (tmp_path / "text").mkdir()
    for name in ("train", "valid"):
        (tmp_path / "text" / f"{name}.txt").write_text("one two three four five six seven\n" * 40)
    options = {"data": [str(tmp_path / "text")], "tokenizer": "bytes", "length": 64}
    one = cell(task="text", task_options=options)
    one = dataclasses.replace(one, lengths=None)
    lengths = {row.size for row in run_cell(one, tmp_path / "a", quiet=True)}
    assert 64 in lengths and 2048 not in lengths and is_done(one, RunFolder(tmp_path / "a"))


@pytest.mark.slow
def test_a_killed_cell_goes_on_within_the_sweep_and_ends_the_same(tmp_path):
    long = cell("a", steps=3000, save_every=50)

    class Killer:
        killed = 0

        def changed(self, state): ...

        def tick(self, states):
            (state,) = states
            if state.process and not self.killed and len(state.folder.read_metrics()) > 30:
                os.kill(state.process.pid, signal.SIGKILL)
                self.killed += 1

    killer = Killer()
    states = run_sweep([long], tmp_path / "sweep", view=killer)
    assert killer.killed == 1 and states[0].status == "done" and states[0].attempts == 2
    train(long.config, tmp_path / "whole", quiet=True)
    assert_same_run(tmp_path / "whole", tmp_path / "sweep" / "a", 3000)


@pytest.mark.slow
def test_stopping_a_sweep_saves_its_cells_and_leaves_no_process(tmp_path):
    file = tmp_path / "long.py"
    file.write_text(
        "from tests.training.tiny import tiny_config\n"
        "from traformer.sweeps.cell import Cell\n"
        "def cells(): return [Cell('a', tiny_config(steps=1_000_000, save_every=1_000_000), '12', 5)]\n"
    )
    command = [sys.executable, "-m", "traformer", "sweep", str(file), "--out", str(tmp_path / "out")]
    for number, status in ((signal.SIGTERM, 143), (signal.SIGKILL, -9)):
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as sweep:
            metrics = tmp_path / "out" / "a" / "metrics.jsonl"
            seen = metrics.stat().st_size if metrics.exists() else 0
            deadline = time.monotonic() + 120
            while not (metrics.exists() and metrics.stat().st_size > seen + 500):
                assert time.monotonic() < deadline
                time.sleep(0.1)
            sweep.send_signal(number)
            error = sweep.communicate()[1]
            assert sweep.returncode == status, error
        if number == signal.SIGTERM:
            assert "the same command resumes" in error
        # Whoever held the folder has let go of it (after saving), even when the sweep itself was killed.
        deadline = time.monotonic() + 60
        while True:
            try:
                with RunFolder(tmp_path / "out" / "a").lock():
                    break
            except Exception:
                assert time.monotonic() < deadline
                time.sleep(0.2)
        assert list((tmp_path / "out" / "a" / "checkpoints").glob("step-*"))


def test_demo_compares_like_with_like():
    cells = demo.cells()
    assert {c.config.attention for c in cells} == {"tra", "rope"} and {c.config.task for c in cells} == {
        "flip_flop",
        "induction",
    }
    for task in ("flip_flop", "induction"):
        pair = [c for c in cells if c.config.task == task]
        assert len(pair) == 2
        assert pair[0].config.replace(attention="x") == pair[1].config.replace(attention="x")
        longest = max(int(part) for part in pair[0].lengths.split(","))
        from traformer.tasks import build_task

        assert longest >= 8 * build_task(task, pair[0].config.task_options).length_range[1]


def test_experiments_are_found_by_name_file_and_module(tmp_path):
    assert experiment_cells(find_experiment("demo")) == experiment_cells(find_experiment("traformer.experiments.demo"))
    file = tmp_path / "mine.py"
    file.write_text("def cells(): return []\n")
    with pytest.raises(InputError, match="at least one"):
        experiment_cells(find_experiment(str(file)))
    file.write_text("x = 1\n")
    with pytest.raises(InputError, match="no function cells"):
        find_experiment(str(file))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import no_such_module\n", "failed in line 1: ModuleNotFoundError: No module named 'no_such_module'"),
        ("def cells(:\n", "failed in line 1: SyntaxError"),
        ("x = 1\n1 / 0\n", "failed in line 2: ZeroDivisionError: division by zero"),
        ("def cells():\n    raise KeyError('seed')\n", "failed in line 2: KeyError"),
        ("def cells(): return 3\n", "must return a list of Cell"),
        ("def cells(): return None\n", "must return a list of Cell"),
        ("def cells(): return ['a']\n", "must return a list of Cell"),
        ("def cells(a): return []\n", "TypeError"),
        ("import sys\nsys.exit(3)\n", "called sys.exit(3)"),
    ],
)
def test_an_experiment_that_fails_is_a_sentence(text, words, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(text)
    assert main(["sweep", str(tmp_path / "mine.py"), "--out", str(tmp_path / "out")]) == 2
    shown = capsys.readouterr().err
    assert words in shown and shown.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["../../escape"], "named '../../escape'"),
        (["/escape"], "named '/escape'"),
        (["a/../../b"], "give the name of a folder below"),
        ([""], "named ''"),
        (["."], "named '.'"),
        (["logs"], "other than cells and logs"),
        (["a", "a"], "two cells of the sweep are named 'a'"),
        (["a", "./a"], "named './a'"),
        (["a", "a/"], "named 'a/'"),
        (["a", "a/b"], "cell 'a/b'"),
    ],
)
@pytest.mark.parametrize("flags", [[], ["--list"]])
def test_names_that_are_no_folders_of_their_own(names, words, flags, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        "from tests.training.tiny import tiny_config\n"
        "from traformer.sweeps.cell import Cell\n"
        f"def cells(): return [Cell(name, tiny_config()) for name in {names!r}]\n"
    )
    assert main(["sweep", str(tmp_path / "mine.py"), "--out", str(tmp_path / "out" / "deep"), *flags]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def next_cells(out, failed): return 1 / 0\n", "failed in line 3: ZeroDivisionError"),
        ("def next_cells(out, failed): return 3\n", "next_cells() of experiment mine must return a list of Cell"),
        (
            "def next_cells(out, failed): return []\ndef verdicts(out): raise KeyError('seed')\n",
            "failed in line 4: KeyErr",
        ),
    ],
)
def test_errors_in_what_follows_the_cells_are_sentences(text, words, tmp_path, capsys):
    (tmp_path / "mine.py").write_text("from tests.sweeps.test_local import cell\ndef cells(): return [cell()]\n" + text)
    make_run(tmp_path / "out" / "a", [1.0, 0.5])
    assert main(["sweep", str(tmp_path / "mine.py"), "--out", str(tmp_path / "out")]) == 2
    shown = capsys.readouterr().err
    assert words in shown and shown.count("\n") == 1
    if "verdicts" in text:
        assert main(["report", str(tmp_path / "out"), "--experiment", str(tmp_path / "mine.py")]) == 2
        assert words in capsys.readouterr().err


def test_a_sweep_in_waves_that_was_done_before_reports(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        "from tests.sweeps.test_local import cell\n"
        "def cells(): return [cell()]\ndef next_cells(out, failed): return []\n"
    )
    make_run(tmp_path / "out" / "a", [1.0, 0.5])
    assert main(["sweep", str(tmp_path / "mine.py"), "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert "exact match" in shown and "the page is" in shown and "0 cells in" in shown


def test_the_overview_shows_brackets_as_they_are_and_says_what_it_counts(tmp_path):
    states = plan([cell("[/a]"), cell("b")], tmp_path)
    states[0].status, states[0].message = "failed", "the text [/home/me/text] has gone"
    screen = StringIO()
    with Overview(Console(file=screen, force_terminal=True, width=120), waves=True) as overview:
        overview.changed(states[0])
        overview.tick(states)
    assert "[/a]" in screen.getvalue() and "[/home/me/text]" in screen.getvalue()
    assert overview.summary(states).startswith("0 of 2 cells of this wave done, 1 failed")
    assert Overview().summary(states).startswith("0 of 2 cells done")


def test_time_left_counts_what_was_done_now(tmp_path):
    states = plan([cell("a"), cell("b")], tmp_path)
    assert time_left(states, 100.0) is None
    states[0].status = "done"
    assert time_left(states, 100.0) == pytest.approx(100.0)
    assert duration(30) == "30 s" and duration(600) == "10 min" and duration(7200) == "2.0 h"
