"""Tiny runs, trained once and copied for each test, and a way to call the command in this process."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.training.tiny import tiny_config
from traformer.cli import main
from traformer.training.loop import train

TEXT = "".join(f"line {n} says hello to you\n" for n in range(2000))


class Outcome(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture
def tra(capsys) -> Callable[..., Outcome]:
    """Run `tra` with some arguments; argparse's own way out counts as a status."""

    def run(*argv: object) -> Outcome:
        capsys.readouterr()
        try:
            status = main([str(part) for part in argv])
        except SystemExit as stopped:
            status = stopped.code if isinstance(stopped.code, int) else 1
        shown = capsys.readouterr()
        return Outcome(status, shown.out, shown.err)

    return run


def refused(outcome: Outcome, *words: str) -> None:
    """One sentence at the end, status 2, no traceback."""
    assert outcome.status == 2, outcome
    *before, last = outcome.err.splitlines()
    assert last.startswith("tra: error: ") and "Traceback" not in outcome.err, outcome.err
    assert not any("error" in line for line in before), outcome.err
    for word in words:
        assert word in last


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "train.txt").write_text(TEXT)
    return folder


@pytest.fixture(scope="session")
def trained(tmp_path_factory, corpus) -> Path:
    """Runs of two steps: a method, a named configuration, a peer, a mixture of two, and text."""
    folder = tmp_path_factory.mktemp("runs")
    for name, changes in {
        "tra": {},
        "rope": {"attention": "rope"},
        "tra_plus": {"attention": "tra_plus"},
        "mixed": {
            "attention": "rope,tra_plus",
            "model_options": {**tiny_config().model_options, "num_hidden_layers": 2},
        },
        "text": {"task": "text", "task_options": {"data": [str(corpus)], "tokenizer": "bytes", "length": 16}},
    }.items():
        train(tiny_config(**{"steps": 2, "save_every": 1, "log_every": 1, **changes}), folder / name, quiet=True)
    return folder


@pytest.fixture
def runs(trained, tmp_path, monkeypatch) -> Path:
    """A copy of the trained runs, which is also the working directory."""
    shutil.copytree(trained, tmp_path / "runs")
    monkeypatch.chdir(tmp_path / "runs")
    return tmp_path / "runs"
