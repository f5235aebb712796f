"""The text task: windows by (seed, index), epochs without repetition, the validation split, and its sentences."""

from __future__ import annotations

import platform
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traformer.errors import InputError, RunError
from traformer.runs.config import RunConfig
from traformer.tasks import TASKS, Text, build_task
from traformer.tasks.text import permuted, window_starts


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRAFORMER_CACHE", str(tmp_path / "cache"))
    place = tmp_path / "corpus"
    place.mkdir()
    # No two windows of 16 tokens are equal, so that a window tells its place.
    (place / "a.train.txt").write_text("".join(f"{n} squared is {n * n}; " for n in range(400)))
    (place / "a.valid.txt").write_text("".join(f"the root of {n * n} is {n}. " for n in range(200)))
    return place


def test_windows_are_the_text_and_all_but_the_first_token_is_scored(folder: Path) -> None:
    task = Text(data=str(folder), length=16)
    text = (folder / "a.train.txt").read_text()
    batch = task.examples(seed=3, start=5, count=40)
    assert batch.input_ids.shape == (40, 16) and batch.lengths.tolist() == [16] * 40
    for row in range(40):
        assert task.decode(batch.input_ids[row]) in text
    assert not batch.answers[:, 0].any() and batch.answers[:, 1:].all()
    assert task.vocab_size == 257 and task.pad_id is None and task.sequence_length == 16


def test_the_same_index_is_the_same_window_however_it_is_asked_for(folder: Path) -> None:
    whole = Text(data=str(folder), length=16).examples(seed=1, start=0, count=900).input_ids  # more than an epoch
    for start, count in [(0, 1), (17, 5), (480, 300), (899, 1)]:
        part = Text(data=(str(folder),), length=16).examples(seed=1, start=start, count=count)
        assert (part.input_ids == whole[start : start + count]).all()
    other = Text(data=str(folder), length=16).examples(seed=2, start=0, count=900).input_ids
    assert (other != whole).any(dim=1).float().mean() > 0.95


@settings(deadline=None, max_examples=200)
@given(st.integers(2, 40), st.integers(0, 3000), st.integers(0, 2**64 - 1))
def test_an_epoch_takes_every_window_once(length: int, more: int, key: int) -> None:
    tokens = length + more
    windows = max(1, (tokens - length + 1) // length)
    for epoch in range(3):
        starts = np.sort(window_starts(tokens, length, key, epoch * windows, windows))
        assert starts[0] >= 0 and starts[-1] + length <= tokens
        assert (np.diff(starts) == length).all()  # side by side: nothing twice
        assert tokens - windows * length < 2 * length  # and less than two windows left over


def test_the_phase_changes_from_epoch_to_epoch() -> None:
    windows = (10_000 - 32 + 1) // 32
    phases = {int(window_starts(10_000, 32, 7, epoch * windows, windows).min()) for epoch in range(20)}
    assert len(phases) > 10


@settings(deadline=None)
@given(st.integers(1, 2000), st.integers(0, 2**64 - 1))
def test_permuted_is_a_permutation(size: int, key: int) -> None:
    assert sorted(permuted(np.arange(size), size, key).tolist()) == list(range(size))


def test_permuted_mixes() -> None:
    order = permuted(np.arange(10_000), 10_000, 5)
    assert abs(np.corrcoef(order, np.arange(10_000))[0, 1]) < 0.05
    assert (np.diff(order) == 1).mean() < 0.01


def test_test_seeds_draw_from_the_validation_split(folder: Path) -> None:
    task = Text(data=str(folder), length=16)
    held_out = (folder / "a.valid.txt").read_text()
    (split,) = task.test_splits("32")
    assert (split.name, split.length, split.task.length) == ("validation", "32", 32)
    batch = split.task.examples(Text.test_seed(0), 0, 20)
    assert all(task.decode(row) in held_out for row in batch.input_ids)
    assert [split.size for split in Text(data=str(folder)).test_splits()] == [128, 256, 512, 1024, 2048, 4096]


def test_places_are_stored_so_that_they_mean_the_same_anywhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    config = RunConfig(task="text", task_options={"data": "corpus"})
    assert config.task_options["data"] == [str(folder)] == list(Text(data="corpus").data)
    assert config.for_resume({"task_options": {"data": ["./corpus"]}}, folder) == config
    monkeypatch.chdir(folder)
    assert build_task("text", config.task_options).examples(0, 0, 1).input_ids.shape == (1, 128)
    with pytest.raises(RunError, match="was started with task_options"):
        config.for_resume({"task_options": {"data": ["."], "length": 64}}, folder)


def test_without_data_the_built_in_text_is_stored_by_name() -> None:
    stored = RunConfig(task="text").task_options["data"]
    assert stored == [f"python-stdlib-{platform.python_version()}"] == list(Text().data)
    assert RunConfig(task="copy").task_options == {}


def test_settings_survive_a_config(folder: Path) -> None:
    task = build_task("text", {"length": 32, "data": [str(folder)], "tokenizer": "bytes", "separator": True})
    again = build_task("text", task.to_options())
    assert again == task and hash(again) == hash(task)
    assert TASKS["text"] is Text


def test_bad_settings_are_told_in_a_sentence(folder: Path) -> None:
    with pytest.raises(InputError, match=r"neither a file, nor a folder \(looked for in .*\), nor one of wikitext-103"):
        Text(data="nowhere").examples(0, 0, 1)
    with pytest.raises(InputError, match="window of 100,000 tokens is longer than the text: the train split"):
        Text(data=str(folder), length=100_000).prepare()
    with pytest.raises(InputError, match="data must be"):
        Text(data=[3])  # type: ignore[list-item]
    with pytest.raises(InputError, match="separator must be true or false"):
        Text(data=str(folder), separator="yes")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="have one length"):
        Text(data=str(folder)).test_splits("20-30")
    with pytest.raises(InputError, match="length 1 is too short"):
        Text(data=str(folder), length=1)


def test_another_tokenizer_than_the_run_was_trained_with_is_refused(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    task = Text(data=str(folder), tokenizer="bpe:270")
    task.write_files(run)
    task.check_files(run)
    Text(data=str(folder), tokenizer=str(run / "tokenizer")).check_files(run)
    with pytest.raises(RunError, match="not the one the run was trained with"):
        Text(data=str(folder)).check_files(run)
    (tmp_path / "other" / "checkpoints").mkdir(parents=True)
    with pytest.raises(RunError, match="lost its folder tokenizer"):
        task.check_files(run.parent / "other")
