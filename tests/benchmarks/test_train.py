"""`tra bench train`: what it prints and writes, that ratios come from the same round, and its sentences."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from traformer.benchmarks import train
from traformer.cli import main

QUICK = ["--sizes", "tiny", "--windows", "32", "--tokens", "64", "--rounds", "3", "--vocabulary", "16"]


def test_prints_and_writes_a_row_for_each_method(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    assert main(["bench", "train", *QUICK, "--attentions", "tra", "alibi", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert "attention dropout 0" in out and "SDPA" in out and "TRA " in out and "A40" in out
    rows = {row["attention"]: row for row in json.loads(file.read_text())["rows"]}
    assert set(rows) == {"tra", "alibi", "rope"}  # the baseline is always measured
    assert rows["rope"]["ratio"] == rows["rope"]["ratio_low"] == rows["rope"]["ratio_high"] == 1.0
    for row in rows.values():
        assert row["seconds"] > 0 and row["ratio_low"] <= row["ratio"] <= row["ratio_high"] and row["batch"] == 2
    if sys.platform == "linux":
        assert all(row["peak_bytes"] > 0 for row in rows.values())


def test_a_round_takes_every_method_once_and_the_first_turns() -> None:
    calls: list[str] = []
    names = ("a", "b", "c")
    steps = {name: (lambda name=name: calls.append(name)) for name in names}
    seconds = train.interleaved(steps, 4)
    assert {name: len(times) for name, times in seconds.items()} == {"a": 4, "b": 4, "c": 4}
    rounds = [calls[start : start + 3] for start in range(0, 12, 3)]
    assert rounds == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"]]


def test_tra_on_another_backend(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "train", *QUICK, "--no-memory", "--attentions", "tra:blockwise"]) == 0
    assert "TRA blockwise" in capsys.readouterr().out


def test_named_configurations(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "train", *QUICK, "--no-memory", "--attentions", "tra_plus", "tra_plus:blockwise"]) == 0
    shown = capsys.readouterr().out
    assert "tra_plus:blockwise" in shown and "TRA blockwise" in shown


def test_gates_that_remember_far_are_set() -> None:
    settings = {"size": "tiny", "window": 16, "tokens": 16, "vocabulary": 8}
    plain, far = (train.Step("tra", **settings, gate_bias=bias) for bias in (0.0, 6.0))
    difference = (
        far.model.model.layers[0].self_attn.decay_proj.bias - plain.model.model.layers[0].self_attn.decay_proj.bias
    )
    assert difference.tolist() == pytest.approx([6.0, 6.0])


@pytest.mark.parametrize(
    "arguments,words",
    [
        (["--attentions", "ropee"], "did you mean 'rope'"),
        (["--attentions", "rope:cpu"], "rope has no backends to choose"),
        (["--attentions", "tra:blokwise"], "did you mean 'blockwise'"),
        (["--sizes", "huge"], "unknown preset"),
        (["--windows", "512"], "more than --tokens 64"),
        (["--json", "no/such/folder/x.json"], "does not exist"),
    ],
)
def test_bad_options(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "train", *QUICK, *arguments]) == 2
    assert words in capsys.readouterr().err
