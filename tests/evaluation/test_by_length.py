from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.training.tiny import tiny_config
from traformer.errors import InputError, RunError
from traformer.evaluation import by_length
from traformer.evaluation.by_length import measure
from traformer.evaluation.evaluate import evaluate_run
from traformer.evaluation.watcher import Watcher
from traformer.runs.folder import RunFolder
from traformer.tasks import FlipFlop, Induction, Instructions
from traformer.training.loop import train


class Oracle(nn.Module):
    """A causal model that knows the next token, but for the rows in `wrong`; one logit an id."""

    def __init__(self, vocabulary: int, wrong: set[int]) -> None:
        super().__init__()
        self.vocabulary, self.wrong, self.row = vocabulary, wrong, 0
        self.unused = nn.Parameter(torch.zeros(()))
        self.head = nn.Identity()

    def base_model(self, input_ids, use_cache):
        following = torch.cat([input_ids[:, 1:], input_ids[:, :1]], dim=1).clone()
        for place in range(len(following)):
            if self.row + place in self.wrong:
                following[place] = 0
        self.row += len(following)
        return SimpleNamespace(last_hidden_state=nn.functional.one_hot(following, self.vocabulary).float())

    def get_output_embeddings(self):
        return self.head


@pytest.mark.parametrize("batch_size", [1, 3, 10])
def test_counts_against_a_model_whose_errors_are_known(batch_size):
    task = FlipFlop(length=16)
    split = task.test_splits("16")[0]
    tally = measure(Oracle(task.vocab_size, {2, 7}), split, 10, 99, batch_size)[""]
    answers = task.test_splits("16")[0].task.examples(seed=99, start=0, count=10).answers
    assert (tally.examples, tally.exact) == (10, 8)
    assert tally.tokens == int(answers.sum())
    assert tally.tokens - tally.correct == int(answers[[2, 7]].sum())


def test_groups_add_up_to_the_whole():
    task = Instructions(max_length=6)
    split = task.test_splits("1-6")[0]
    tallies = measure(Oracle(task.vocab_size, {0, 3}), split, 40, 5, 7)
    whole = tallies.pop("")
    assert len(tallies) > 2
    assert sum(tally.examples for tally in tallies.values()) == whole.examples == 40
    assert sum(tally.exact for tally in tallies.values()) == whole.exact == 38


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "run"
    train(tiny_config(steps=4), path, quiet=True)
    return path


def test_rows_hold_what_a_table_needs(run):
    rows = evaluate_run(run, "12,24", 20, device="cpu")
    assert len(rows) == 2 * 3 * 3  # lengths x splits x metrics
    first = rows[0]
    assert (first.task, first.attention, first.step, first.examples) == ("flip_flop", "tra", 4, 20)
    assert {row.split for row in rows} == {"iid", "sparse", "dense"}
    assert {row.metric for row in rows} == {"exact_match", "token_accuracy", "error_per_read"}
    for row in rows:
        assert 0 <= row.low <= row.value <= row.high <= 1
    errors = {(r.split, r.length): r.value for r in rows if r.metric == "error_per_read"}
    for row in rows:
        if row.metric == "token_accuracy":
            assert errors[row.split, row.length] == pytest.approx(1 - row.value)


def test_batch_size_changes_nothing(run):
    small = evaluate_run(run, "12-24", 20, device="cpu", batch_tokens=24, again=True)
    large = evaluate_run(run, "12-24", 20, device="cpu", batch_tokens=4096, again=True)
    assert small == large


def test_what_is_measured_is_not_measured_again(run, monkeypatch):
    before = evaluate_run(run, "16", 10, device="cpu")
    calls = []
    original = by_length.measure
    monkeypatch.setattr(by_length, "measure", lambda *a, **k: calls.append(a[1].name) or original(*a, **k))
    assert evaluate_run(run, "16", 10, device="cpu") == before and calls == []
    evaluate_run(run, "16,18", 10, device="cpu")
    assert len(calls) == 3
    assert evaluate_run(run, "16", 10, device="cpu", again=True) == before and len(calls) == 6
    # Another number of examples replaces the rows, so that a length never stands there twice.
    evaluate_run(run, "16", 12, device="cpu")
    rows = [r for r in RunFolder(run).results.read() if r.length == 16]
    assert len(rows) == 9 and {row.examples for row in rows} == {12}


def test_a_killed_evaluation_keeps_its_splits(run, monkeypatch):
    original = by_length.measure

    def killed(model, split, *rest):
        if split.name == "dense":
            raise KeyboardInterrupt
        return original(model, split, *rest)

    monkeypatch.setattr(by_length, "measure", killed)
    with pytest.raises(KeyboardInterrupt):
        evaluate_run(run, "20", 10, device="cpu")
    done = {row.split for row in RunFolder(run).results.read() if row.length == 20}
    assert done == {"iid", "sparse"}


def test_a_length_beyond_memory_is_said_before_anything_is_measured(run, monkeypatch):
    monkeypatch.setattr(by_length, "measure", lambda *a, **k: pytest.fail("tried"))
    with pytest.raises(InputError, match=r"one sequence of 1099511627776 tokens .* GiB .* leave that length out"):
        evaluate_run(run, f"12,{2**40}", 10, device="cpu", again=True)


def test_overlap_with_training_is_counted(tmp_path):
    config = tiny_config(task_options={"length": 4}, steps=10)  # so short that examples recur
    train(config, tmp_path / "run", quiet=True)
    rows = evaluate_run(tmp_path / "run", "4,8", 50, device="cpu")
    seen = {(r.split, r.length): r.seen_in_training for r in rows if r.metric == "exact_match"}
    assert seen["iid", 4] == 1.0 and seen["iid", 8] == 0.0


def test_chance_stands_beside_induction(tmp_path):
    config = tiny_config(task="induction", task_options={"max_length": 6}, steps=2)
    train(config, tmp_path / "run", quiet=True)
    rows = evaluate_run(tmp_path / "run", "6", 10, device="cpu")
    row = next(row for row in rows if row.metric == "exact_match")
    assert row.chance == pytest.approx(Induction(max_length=6, min_length=6).chance())


def test_damaged_run_and_missing_step(run, tmp_path):
    with pytest.raises(RunError, match="no checkpoint of step 3; it has: 4"):
        evaluate_run(run, "12", 5, step=3, device="cpu")
    import shutil

    shutil.copytree(run, tmp_path / "copy")
    (tmp_path / "copy" / "checkpoints" / "step-4" / "state.json").unlink()
    with pytest.raises(RunError, match="no undamaged checkpoint"):
        evaluate_run(tmp_path / "copy", "12", 5, device="cpu")
    told: list[str] = []

    class Listener(Watcher):
        def say(self, text: str) -> None:
            told.append(text)

    with pytest.raises(RunError, match="no undamaged checkpoint"):
        evaluate_run(tmp_path / "copy", "12", 5, device="cpu", watcher=Listener())
    assert "state.json is missing" in told[0]
