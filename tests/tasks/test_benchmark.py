"""The generator benchmark: its rows, its errors, and the speed it must not fall below."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from traformer.benchmarks import tasks as benchmark
from traformer.errors import TraformerError
from traformer.tasks import TASKS


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    benchmark.add_arguments(parser)
    return benchmark.main(parser.parse_args(arguments))


def test_measures_every_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    assert run("--batch-size", "4", "--repeats", "3", "--json", str(file)) == 0
    printed = capsys.readouterr().out
    rows = json.loads(file.read_text())["rows"]
    assert [row["task"] for row in rows] == list(benchmark.SETTINGS)
    assert {name for name, _ in benchmark.SETTINGS.values()} <= set(TASKS)
    for row in rows:
        assert 0 < row["slowest"] <= row["tokens_per_second"] <= row["fastest"]
        assert row["batch_size"] == 4 and row["batches"] == 3
        assert row["task"] in printed


def test_flip_flop_makes_five_million_tokens_a_second() -> None:
    assert benchmark.measure("flip_flop", batch_size=64, repeats=20)["tokens_per_second"] >= 5e6


def test_chosen_tasks(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    run("--task", "copy", "--task", "induction", "--batch-size", "2", "--repeats", "1", "--json", str(file))
    labels = [row["task"] for row in json.loads(file.read_text())["rows"]]
    assert labels == ["copy unique", "copy letters", "copy binary", "induction"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--task", "flipflop"), "unknown task 'flipflop'; did you mean 'flip_flop'?"),
        (("--batch-size", "0"), "--batch-size 0 is too small; give at least 1"),
        (("--repeats", "0"), "--repeats 0 is too small; give at least 1"),
        (("--json", "no/such/folder/x.json"), "no/such/folder/x.json cannot be written: the folder"),
    ],
)
def test_bad_options(arguments: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(TraformerError) as caught:
        run(*arguments)
    assert str(caught.value).startswith(sentence)
