"""Short examples first: which lengths a step draws from, that a resumed run draws the same, and what is refused."""

import shutil

import pytest

from tests.training.test_loop import assert_same_run
from tests.training.tiny import tiny_config
from traformer.errors import InputError
from traformer.evaluation.evaluate import evaluate_run
from traformer.tasks import Copy, Task, build_task
from traformer.tasks.algorithmic import PROBLEMS
from traformer.training.curriculum import task_of_step
from traformer.training.loop import train

COPY = {"task": "copy", "task_options": {"max_length": 9, "vocabulary": 20}}


def test_the_longest_length_grows_evenly_and_then_stays():
    task = build_task("copy", {"max_length": 50, "min_length": 2})
    ranges = [task_of_step(task, step, steps=100, share=0.6).length_range for step in range(100)]
    assert {low for low, _ in ranges} == {2}
    longest = [high for _, high in ranges]
    assert longest == sorted(longest) and longest[0] == 2 and longest[58] == 49 and longest[29] == 26
    assert all(task_of_step(task, step, 100, 0.6) is task for step in range(59, 100))
    assert all(task_of_step(task, step, 100, 0.0) is task for step in range(100))
    # The ids of symbols are those of the whole task, so that one model reads both.
    assert task_of_step(task, 0, 100, 0.6).token_names == task.token_names


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("flip_flop", {"length": 32, "min_length": 8}),
        ("recall", {"length": 64, "min_length": 10}),
        ("recall", {"length": 66, "min_length": 6, "data": []}),
        ("instructions", {"max_length": 20}),
        *(("algorithmic", {"problem": problem, "max_length": 40}) for problem in PROBLEMS),
    ],
)
def test_every_growing_length_is_one_that_the_task_has(name, options):
    task = build_task(name, options)
    ranges = [task_of_step(task, step, steps=80, share=0.5).length_range for step in range(80)]
    longest = [high for _, high in ranges]
    assert longest == sorted(longest) and longest[-1] == task.length_range[1]
    assert {low for low, _ in ranges} == {task.length_range[0]} and len(set(longest)) > 4
    task_of_step(task, 0, 80, 0.5).arrays(0, 0, 4)


def test_a_step_sees_no_longer_example(tmp_path, monkeypatch):
    seen = []
    draw = Copy.examples

    def watched(self, seed, start, count):
        batch = draw(self, seed, start, count)
        seen.append((int(batch.lengths.max()) - 3) // 2)
        return batch

    monkeypatch.setattr(Copy, "examples", watched)
    train(tiny_config(**COPY, steps=16, curriculum=1.0), tmp_path / "run", quiet=True)
    assert all(length <= 1 + 8 * (step + 1) / 16 for step, length in enumerate(seen))
    assert len(seen) == 16 and max(seen) >= 7


def test_the_share_seen_in_training_is_that_of_the_growing_lengths(tmp_path, monkeypatch):
    shown = set()
    draw = Copy.examples

    def watched(self, seed, start, count):
        batch = draw(self, seed, start, count)
        shown.update(self.decode(ids) for ids in batch.input_ids)
        return batch

    options = {"max_length": 8, "min_length": 1, "alphabet": "binary"}
    monkeypatch.setattr(Copy, "examples", watched)
    train(tiny_config(task="copy", task_options=options, steps=20, curriculum=0.8), tmp_path / "run", quiet=True)
    monkeypatch.undo()
    rows = evaluate_run(tmp_path / "run", "3,6,8", 100, device="cpu")
    for row in rows:
        if row.metric == "exact_match":
            test = Copy(**options).at_length(int(row.length), int(row.length))
            ids = test.examples(Task.test_seed(row.seed), 0, 100).input_ids
            assert row.seen_in_training == sum(test.decode(one) in shown for one in ids) / 100
    assert len({row.seen_in_training for row in rows if row.metric == "exact_match"}) == 3


def test_a_resumed_curriculum_is_the_same_run(tmp_path):
    config = tiny_config(**COPY, curriculum=0.7)  # checkpoints at 4, 8, 12
    train(config, tmp_path / "whole", quiet=True)
    train(config, tmp_path / "broken", quiet=True)
    for step in (12, 8):
        shutil.rmtree(tmp_path / "broken" / "checkpoints" / f"step-{step}", ignore_errors=True)
    train(config, tmp_path / "broken", resume=True, quiet=True)
    assert_same_run(tmp_path / "whole", tmp_path / "broken", 12)


@pytest.mark.parametrize("task", ["flip_flop", "text"])
def test_one_length_has_nothing_to_grow(tmp_path, task):
    options = {"length": 12} if task == "flip_flop" else {"length": 12, "data": ["python-stdlib"]}
    with pytest.raises(InputError, match="needs training lengths that vary"):
        train(tiny_config(task=task, task_options=options, curriculum=0.5), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
