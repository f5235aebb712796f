"""What holds for every task: random access, seeds, configs, text, and imports that stay light."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import traformer
from traformer.cli import main
from traformer.errors import InputError
from traformer.runs.measurements import ResultStore
from traformer.tasks import (
    TASKS,
    Copy,
    FlipFlop,
    Induction,
    Instructions,
    Task,
    build_task,
    parse_lengths,
    rng,
)
from traformer.tasks.base import Arrays, best_constant_answer
from traformer.tasks.lengths import draw_lengths

EVERY_TASK = [
    FlipFlop(length=32),
    FlipFlop(length=40, min_length=4, p_ignore=0.3),
    Copy("unique", max_length=12),
    Copy("letters", max_length=12),
    Copy("binary", max_length=3),
    Induction(max_length=12),
    Instructions(max_length=12),
    Instructions(max_length=9, min_length=1, instructions=("last", "copy"), symbols=5),
]
every_task = pytest.mark.parametrize("task", EVERY_TASK, ids=lambda task: f"{task.name}-{task.length_range}")


def examples_alone(task: Task, seed: int, start: int, count: int) -> list[tuple]:
    """Each example without its padding, as plain lists."""
    batch = task.examples(seed, start, count)
    fields = (batch.input_ids, batch.answers, batch.sources)
    return [tuple(f[row, :n].tolist() for f in fields) for row, n in enumerate(batch.lengths.tolist())]


@every_task
@settings(deadline=None, max_examples=15)
@given(
    seed=st.integers(0, 2**63 - 1),
    start=st.integers(0, 2**50),
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=5),
)
def test_same_example_however_it_is_asked_for(task: Task, seed: int, start: int, cuts: list[int]) -> None:
    whole = examples_alone(task, seed, start, sum(cuts))
    pieces, at = [], start
    for cut in cuts:
        pieces += examples_alone(task, seed, at, cut)
        at += cut
    assert pieces == whole


@every_task
def test_batch_shapes_and_dtypes(task: Task) -> None:
    batch = task.examples(seed=0, start=0, count=33)
    assert len(batch) == 33
    assert batch.input_ids.dtype == batch.sources.dtype == batch.lengths.dtype == torch.int64
    assert batch.answers.dtype == torch.bool
    assert batch.input_ids.shape == (33, int(batch.lengths.max()))  # no column of padding alone
    assert int(batch.lengths.max()) <= task.sequence_length
    assert int(batch.input_ids.max()) < task.vocab_size
    assert torch.equal(batch.attention_mask, batch.input_ids != task.pad_id)
    assert batch.answers.any(dim=1).all() and not batch.answers[:, 0].any()
    labels = batch.labels()
    assert torch.equal(labels[batch.answers], batch.input_ids[batch.answers])
    assert (labels[~batch.answers] == -100).all()
    # A source lies before the answer and, where there is one, holds the same token.
    rows, columns = (batch.sources >= 0).nonzero(as_tuple=True)
    origin = batch.sources[rows, columns]
    assert batch.answers[rows, columns].all() and (origin < columns).all()
    assert torch.equal(batch.input_ids[rows, origin], batch.input_ids[rows, columns])
    assert batch.to("cpu").input_ids.device.type == "cpu"


@every_task
def test_sequence_length_is_reached_and_never_passed(task: Task) -> None:
    assert int(task.arrays(seed=0, start=0, count=3000).lengths.max()) == task.sequence_length


@every_task
def test_config_round_trip(task: Task) -> None:
    options = json.loads(json.dumps(task.to_options()))
    again = build_task(task.name, options)
    assert again == task and type(again).from_options(options) == task
    assert np.array_equal(again.arrays(1, 2, 3).input_ids, task.arrays(1, 2, 3).input_ids)


@every_task
def test_text_round_trip(task: Task) -> None:
    batch = task.examples(seed=0, start=0, count=8)
    assert len(set(task.token_names)) == task.vocab_size
    for row, length in enumerate(batch.lengths.tolist()):
        text = task.decode(batch.input_ids[row])
        assert task.encode(text) == batch.input_ids[row, :length].tolist()
        assert task.decode(batch.input_ids[row].tolist()) == text
        marked = task.format(batch, row)
        words = marked.split(" ")
        assert [w.strip("[]") for w in words] == text.split(" ")
        assert [w.startswith("[") and w.endswith("]") for w in words] == batch.answers[row, :length].tolist()

        from rich.text import Text

        styled = Text.from_markup(task.format(batch, row, markup=True))
        assert styled.plain == text and len(styled.spans) == int(batch.answers[row].sum())


@every_task
def test_streams_differ(task: Task) -> None:
    def rows(drawn_from: Task, seed: int, start: int = 0) -> list[tuple]:
        return examples_alone(drawn_from, seed, start, 40)

    base = rows(task, 0)
    assert rows(task, 1) != base and rows(task, 0, start=40) != base
    assert rows(task, Task.test_seed(0)) != base
    for split in task.test_splits():
        assert rows(split.task, Task.test_seed(0)) != base


def test_test_seeds_are_no_training_seeds() -> None:
    with pytest.raises(InputError, match=r"training seed is a whole number from 0 to 2\*\*62 - 1"):
        Task.test_seed(Task.test_seed(0))
    assert Task.test_seed(5) == 2**62 + 5


def test_flip_flop_test_examples_are_not_training_examples() -> None:
    task = FlipFlop(length=128)
    training = {row.tobytes() for row in task.arrays(0, 0, 5000).input_ids}
    test = {row.tobytes() for row in task.arrays(Task.test_seed(0), 0, 5000).input_ids}
    assert len(training) == len(test) == 5000 and not training & test


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("flip_flop", "fd168a32567669f2"),
        ("copy", "db9c8597305ef40d"),
        ("induction", "87832c84836bc6bd"),
        ("instructions", "cc4313a0d78d3649"),
    ],
)
def test_examples_are_pinned(name: str, digest: str) -> None:
    """The streams are part of the interface: a change would silently alter what a resumed run trains on."""
    task = build_task(name)
    text = " ".join(task.decode(ids) for ids in task.examples(seed=0, start=1000, count=50).input_ids)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == digest


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((-1, 0, 1), "seed -1 is out of range; give a whole number from 0 to 2**63 - 1"),
        ((2**63, 0, 1), f"seed {2**63} is out of range; give a whole number from 0 to 2**63 - 1"),
        ((0.5, 0, 1), "seed must be a whole number, not 0.5"),
        ((0, -3, 1), "start -3 is negative; the first example has index 0"),
        ((0, 0, 0), "count 0 is too small; ask for at least 1 example"),
    ],
)
def test_bad_requests(arguments: tuple, sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        FlipFlop().examples(*arguments)
    assert str(caught.value) == sentence


def test_numpy_integers_are_integers() -> None:
    batch = FlipFlop(length=np.int64(8)).examples(np.int64(1), np.int32(2), np.int64(3))
    assert torch.equal(batch.input_ids, FlipFlop(length=8).examples(1, 2, 3).input_ids)


def test_bad_text_and_ids() -> None:
    with pytest.raises(InputError) as caught:
        FlipFlop().encode("w 1 x")
    assert str(caught.value).startswith("unknown flip_flop token 'x'. ")
    with pytest.raises(InputError) as caught:
        FlipFlop().decode([1, 6])
    assert str(caught.value) == "ids holds 6, but flip_flop has token ids 0 to 5 only"
    with pytest.raises(InputError, match="399x"):
        Copy().encode("<bos> 399x")


def test_build_task() -> None:
    assert build_task("flip_flop", {"length": 64}) == FlipFlop(length=64)
    assert build_task("copy", {"max_length": 20, "alphabet": "letters"}) == Copy("letters", max_length=20)
    assert build_task("induction") == Induction()
    for call, sentence in (
        (lambda: build_task("flipflop"), "unknown task 'flipflop'; did you mean 'flip_flop'? Known: "),
        (lambda: build_task("copy", {"alphabett": "x"}), "unknown copy setting 'alphabett'; did you mean 'alphabet'?"),
    ):
        with pytest.raises(InputError) as caught:
            call()
        assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("given", "ranges"),
    [
        ("20,40,80", [(20, 20), (40, 40), (80, 80)]),
        ("51-100, 7", [(51, 100), (7, 7)]),
        ([20, "2k", "1k-1M"], [(20, 20), (2048, 2048), (1024, 1 << 20)]),
        ("0-50", [(0, 50)]),
    ],
)
def test_parse_lengths(given: object, ranges: list) -> None:
    assert parse_lengths(given) == ranges  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("", "lengths is empty; give for example 20,40,80 or 51-100"),
        ([], "lengths is empty; give for example 20,40,80 or 51-100"),
        ("20,x", "lengths has 'x'; give whole numbers or ranges, for example 20,40,80 or 51-100"),
        ("20,,40", "lengths has ''; give whole numbers or ranges, for example 20,40,80 or 51-100"),
        ([-4], "lengths has '-4'; give whole numbers or ranges, for example 20,40,80 or 51-100"),
        ([2.5], "lengths has '2.5'; give whole numbers or ranges, for example 20,40,80 or 51-100"),
        ("9-3", "lengths has the range '9-3', which ends before it starts; write 3-9"),
    ],
)
def test_bad_lengths(given: object, sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_lengths(given)  # type: ignore[arg-type]
    assert str(caught.value) == sentence


def test_every_task_says_what_it_is() -> None:
    for name, task in TASKS.items():
        assert task.name == name and task.label and "\n" not in task.label
        assert task.length_setting in task.setting_names()


def test_names_need_no_torch() -> None:
    code = "import sys, traformer.tasks as t; [c.label for c in t.TASKS.values()]; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# A task is one file and one entry -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Parity(Task):
    """The parity of a string of bits: everything a task has to define."""

    max_length: int = 8
    min_length: int = 1

    name: ClassVar[str] = "parity"
    label: ClassVar[str] = "Parity"

    def _token_names(self) -> tuple[str, ...]:
        return ("<pad>", "0", "1", "=")

    @property
    def sequence_length(self) -> int:
        return self.max_length + 2

    @property
    def length_range(self) -> tuple[int, int]:
        return self.min_length, self.max_length

    def _stream(self) -> tuple[int, ...]:
        return self.length_range

    def at_length(self, shortest: int, longest: int) -> Parity:
        return dataclasses.replace(self, min_length=shortest, max_length=longest)

    def default_test_lengths(self) -> list[tuple[int, int]]:
        return [(self.max_length, self.max_length)]

    def _generate(self, keys: rng.Words) -> Arrays:
        lengths = draw_lengths(keys, 0, self.min_length, self.max_length)
        count, longest = len(keys), int(lengths.max())
        bits = rng.below(rng.draw_row(keys, 1, longest), 2)
        place = np.arange(longest + 2)
        inside = np.arange(longest) < lengths[:, None]
        ids = np.zeros((count, longest + 2), dtype=np.int64)
        ids[:, :longest] = np.where(inside, bits + 1, 0)
        np.copyto(ids, 3, where=place == lengths[:, None])
        answers = place == lengths[:, None] + 1
        np.copyto(ids, 1 + ((bits * inside).sum(axis=1) % 2)[:, None], where=answers)
        return Arrays(ids, answers, np.full_like(ids, -1), lengths + 2)


def test_a_task_is_one_class_and_one_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Trained, measured and reported under its own label, with chance, by its name alone."""
    monkeypatch.setitem(TASKS, "parity", Parity)
    run = str(tmp_path / "run")
    size = ["--preset", "tiny", "--layers", "1", "--width", "16", "--heads", "2", "--threads", "1"]
    assert main(["train", "--task", "parity", *size, "--steps", "2", "--batch-size", "4", "--out", run]) == 0
    assert main(["eval", run, "--lengths", "8,16", "--examples", "8", "--threads", "1"]) == 0
    assert main(["stretch", run, "--lengths", "32", "--examples", "2", "--threads", "1"]) == 0
    assert main(["report", run]) == 0
    assert "Parity, trained to 8: exact match" in capsys.readouterr().out
    page = (tmp_path / "run" / "report.html").read_text()
    assert ">Parity: exact match<" in page and "the most frequent answer token, always" in page
    found = ResultStore(run).read()
    assert {one.metric for one in found} >= {"exact_match", "token_accuracy", "keys_read"}
    assert all(0.4 < one.chance < 0.6 for one in found if one.metric == "exact_match")


def test_a_new_task_has_a_stream_of_its_own_and_old_ones_keep_theirs() -> None:
    assert Parity().stream is None and Parity().stream_key(0) != dataclasses.replace(Parity(), max_length=9).stream_key(
        0
    )
    assert rng.name_key("parity") != rng.name_key("copy")
    assert {task.stream for task in TASKS.values() if task.stream} == {1, 2, 3, 4, 5, 6}


def test_no_other_module_asks_which_task_it_has() -> None:
    """What differs between tasks is theirs to say; experiments, benchmarks and defaults name tasks to run."""
    source = Path(traformer.__file__).parent
    names = "|".join(TASKS)
    asking = re.compile(rf'\b(task|tasks|name)\b[^"\n]*(==|!=) *"({names})"|\btask in \(|isinstance\([^)]*\bText\)')
    for folder in ("evaluation", "reports", "runs", "training", "models", "sweeps", "commands"):
        for file in sorted((source / folder).rglob("*.py")):
            found = [line for line in file.read_text().splitlines() if asking.search(line)]
            assert not found, f"{file.name}: {found}"


@every_task
def test_chance_of_every_accuracy(task: Task) -> None:
    """A probability, and never above what the best constant answer or the task's own guess can reach."""
    for metric in ("exact_match", "token_accuracy"):
        chance = task.chance(metric)
        assert chance is not None and 0 <= chance <= 1
    assert type(task).guess


def test_best_constant_answer_is_counted() -> None:
    ids = np.array([[9, 4, 4], [9, 4, 5], [9, 5, 0]])
    answers = np.array([[False, True, True], [False, True, True], [False, True, False]])
    arrays = Arrays(ids, answers, np.full_like(ids, -1), np.array([3, 3, 2]))
    assert best_constant_answer(arrays, "token_accuracy") == 3 / 5
    assert best_constant_answer(arrays, "exact_match") == 1 / 3


def test_chance_of_instructions_is_that_of_guessing_symbols() -> None:
    task = Instructions(min_length=2, max_length=2, instructions=("copy", "first"), symbols=4)
    assert task.chance() == pytest.approx((1 / 16 + 1 / 4) / 2)
    assert task.group_chance("exact_match", "copy") == 1 / 16 and task.group_chance("exact_match", "first") == 1 / 4
    assert task.group_chance("token_accuracy", "first") == pytest.approx((1 / 4 + 1) / 2)


def test_the_keys_that_decide_an_answer() -> None:
    sources = torch.tensor([5, 9])
    assert FlipFlop().deciding_keys(sources).tolist() == [[4, 5], [8, 9]]
    assert Copy().deciding_keys(sources).tolist() == [[5], [9]]
