"""From a model to a tuned one by the commands of docs/upcycle.md, and every command takes what comes of it."""

from __future__ import annotations

import json

import pytest

from tests.commands.conftest import refused
from tests.training.tiny_llama import text_folder, tiny_llama
from traformer.runs.folder import RunFolder

SHORT = ["--steps", "2", "--batch-size", "2", "--threads", "1", "--length", "16"]


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    root = tmp_path_factory.mktemp("upcycle")
    return {"llama": tiny_llama(root / "llama", layers=2), "text": text_folder(root / "text")}


def test_the_commands_of_the_page(places, tra, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pattern = ["--attention", "rope,tra_straight_through", "--attention-option", "rope={sliding_window: 8, sinks: 2}"]
    assert tra("convert", places["llama"], *pattern, "--out", "hybrid").status == 0
    text = ["--task", "text", "--task-option", f"data={places['text']}"]
    teach = ["--teacher", places["llama"]]
    done = tra("train", "--from", "hybrid", *teach, "--objective", "layers", *text, *SHORT, "--out", "stage1")
    assert done.status == 0, done.err
    assert "answer accuracy" not in done.out  # no token is predicted
    more = ["--objective", "logits", "--train-only", "attention", "--lora", "2"]
    done = tra("train", "--from", "stage1", *teach, *more, *SHORT, "--out", "stage2")
    assert done.status == 0, done.err
    config = RunFolder("stage2").read_config()
    assert (config.task, config.preset, config.attention) == ("text", "converted", "rope,tra_variant")
    assert tra("train", "--resume", "--out", "stage2").status == 0
    for command in (
        ("eval", "stage2", "--lengths", "16,64", "--examples", "1"),
        ("generate", "stage2", "--prompt", "line 7", "--max-new-tokens", "3"),
        ("explore", "stage2", "--out", "page.html"),
        ("report", "stage1", "stage2", "--out", "report"),
    ):
        done = tra(*command)
        assert done.status == 0, (command, done.err)
    rows = json.loads((tmp_path / "stage2" / "results.json").read_text())
    assert {row["length"] for row in rows} == {16, 64}


def test_what_is_not_converted_is_refused(places, tra, tmp_path):
    text = ["--task", "text", "--task-option", f"data={places['text']}"]
    done = tra("train", "--from", places["llama"], *text, *SHORT, "--out", tmp_path / "run")
    refused(done, "holds a model of type 'llama'", "convert it first: tra convert")
