"""`tra train --from DIR`: training that starts from a run or a saved model."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file

from tests.commands.conftest import refused
from traformer.runs.folder import RunFolder

STILL = ["--steps", "1", "--lr", "1e-30", "--batch-size", "4", "--threads", "1", "--weight-decay", "0"]


def weights(path) -> dict[str, torch.Tensor]:
    return load_file(RunFolder(path).find_checkpoint().path / "model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("kind", ["tra", "tra_plus", "rope", "mixed", "text"])
def test_a_run_goes_on_from_another_runs_weights(kind, runs, tra):
    done = tra("train", "--from", kind, *STILL, "--seed", "7", "--out", "next")
    assert done.status == 0, done.err
    old, new = RunFolder(kind).read_config(), RunFolder("next").read_config()
    assert (new.task, new.task_options, new.attention) == (old.task, old.task_options, old.attention)
    assert new.from_model == str(runs / kind)
    assert same(weights(kind), weights("next"))
    assert tra("eval", "next", "--lengths", "16", "--examples", "2").status == 0
    shutil.rmtree(kind)  # a trained run needs its start no more
    assert tra("train", "--resume", "--out", "next").status == 0
    assert tra("generate", "next", "--prompt", "w 1" if kind != "text" else "a", "--max-new-tokens", "1").status == 0


def test_another_length_and_dropout_are_settings_of_the_new_run(runs, tra):
    done = tra("train", "--from", "tra", *STILL, "--length", "20", "--dropout", "0", "--out", "next")
    assert done.status == 0, done.err
    config = RunFolder("next").read_config()
    assert config.task_options == {"length": 20}
    assert config.model_options["attention_dropout"] == config.model_options["hidden_dropout"] == 0.0
    assert config.model_options["hidden_size"] == 16


@pytest.mark.parametrize("kind", ["tra", "mixed"])
def test_a_saved_models_folder(kind, runs, tra):
    folder = f"{kind}/checkpoints/step-2"
    done = tra("train", "--from", folder, "--task", "flip_flop", "--length", "12", *STILL, "--out", "next")
    assert done.status == 0, done.err
    assert same(weights(kind), weights("next"))


def test_a_run_with_a_tokenizer_of_its_own_tunes_on_other_text(runs, tra, corpus, tmp_path):
    small = ["--preset", "tiny", "--layers", "1", "--width", "16", "--heads", "2", *STILL[:-2], "--length", "16"]
    options = ["--task", "text", "--task-option", f"data={corpus}", "--task-option", "tokenizer=bpe:260"]
    assert tra("train", *small, *options, "--out", "bpe").status == 0
    (tmp_path / "other.txt").write_text("another text about other things\n" * 3000)
    more = ["--task", "text", "--task-option", f"data={tmp_path / 'other.txt'}"]
    done = tra("train", "--from", "bpe", *STILL, *more, "--out", "next")
    assert done.status == 0, done.err
    assert RunFolder("next").read_config().task_options["tokenizer"] == str(runs / "bpe" / "tokenizer")
    assert same(weights("bpe"), weights("next"))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--from", "tra", "--task", "copy"], "has a vocabulary of 6 tokens, but copy has"),
        (["--from", "tra", "--attention", "rope"], "--from brings its own model; leave out what sets its attention"),
        (["--from", "tra", "--layers", "3"], "leave out what sets its model options"),
        (["--from", "tra", "--preset", "tiny"], "leave out what sets its preset"),
        (["--from", "absent"], "is neither a run folder nor a saved model"),
        (["--from", "other"], "holds a model of type 'llama'; --from takes"),
    ],
)
def test_what_cannot_be_started_from(argv, words, runs, tra):
    (runs / "other").mkdir()
    (runs / "other" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (runs / "other" / "model.safetensors").write_bytes(b"")
    refused(tra("train", *argv, *STILL, "--out", "next"), words)
    assert not (runs / "next").exists()


def test_the_start_is_needed_until_the_first_checkpoint(runs, tra):
    assert tra("train", "--from", "tra", *STILL, "--out", "next").status == 0
    shutil.rmtree(runs / "next" / "checkpoints")
    shutil.rmtree(runs / "tra")
    refused(tra("train", "--resume", "--out", "next"), "is neither a run folder nor a saved model")


@pytest.mark.parametrize(("file", "sentence"), [("model.safetensors", "is damaged"), ("config.json", "cannot be read")])
def test_a_cut_file_is_refused_before_the_folder_is_made(file, sentence, runs, tra, tmp_path):
    shutil.copytree("tra/checkpoints/step-2", "cut")
    os.truncate(f"cut/{file}", 100)
    done = tra("train", "--from", "cut", "--task", "flip_flop", "--length", "12", *STILL, "--out", "next")
    refused(done, f"{file} {sentence}")
    assert not os.path.exists("next")
