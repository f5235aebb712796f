"""Every command that takes a run, with every kind of run: a method, a named configuration, a mixture, text.

A converted model is a saved model, not a run: what needs a run says so.
"""

from __future__ import annotations

import json

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from tests.commands.conftest import refused
from traformer.models import convert

KINDS = ("tra", "tra_plus", "rope", "mixed", "text")


@pytest.mark.parametrize("kind", KINDS)
def test_eval_and_report(kind, runs, tra):
    done = tra("eval", kind, "--lengths", "16", "32", "--examples", "2", "--threads", "1")
    assert done.status == 0, done.err
    assert f"{kind}/results.json" in done.out and ("perplexity" if kind == "text" else "exact match") in done.out
    rows = json.loads((runs / kind / "results.json").read_text())
    assert {row["attention"] for row in rows} == {{"text": "tra", "mixed": "rope,tra_plus"}.get(kind, kind)}
    done = tra("report", kind)
    assert done.status == 0, done.err
    assert (runs / kind / "report.html").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_stretch(kind, runs, tra):
    done = tra("stretch", kind, "--lengths", "16,32", "--examples", "1", "--threads", "1", "--out", "stretched")
    if kind == "text":
        refused(done, "for text, use `tra eval`")
    else:
        assert done.status == 0, done.err
        assert (runs / "stretched" / "stretch.json").exists() and "how far it stretches" in done.out


@pytest.mark.parametrize("kind", KINDS)
def test_diagnose(kind, runs, tra):
    done = tra("diagnose", kind, "--lengths", "16", "--examples", "1", "--queries", "2", "--threads", "1")
    if kind == "text":
        refused(done, "names no source")
    else:
        assert done.status == 0, done.err
        assert (runs / kind / "diagnosis" / "diagnosis.json").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_generate(kind, runs, tra):
    prompt = "line" if kind == "text" else "w 1 i 0"
    done = tra("generate", kind, "--prompt", prompt, "--max-new-tokens", "3", "--threads", "1")
    assert done.status == 0, done.err
    assert done.out.startswith(prompt) and len(done.out) > len(prompt) + 1


@pytest.mark.parametrize("kind", KINDS)
def test_predict(kind, runs, tra):
    done = tra("bench", "predict", "--lengths", "32", "--decays", "never", "--devices", "a100", "--run", kind)
    if kind == "rope":
        refused(done, "a model without threshold relative attention")
    else:
        assert done.status == 0, done.err
        assert "| never | forward |" in done.out and "| run | forward |" in done.out


@pytest.mark.parametrize("kind", KINDS)
def test_resume(kind, runs, tra):
    done = tra("train", "--resume", "--out", kind)
    assert done.status == 0, done.err
    assert "already complete at step 2" in done.err


@pytest.mark.parametrize("saved", ["converted", "ours"])
@pytest.mark.parametrize(
    "command",
    [
        ["eval"],
        ["stretch", "--lengths", "16"],
        ["diagnose"],
        ["generate", "--prompt", "w 1"],
        ["bench", "attention", "--lengths", "16", "--run"],
        ["bench", "predict", "--lengths", "16", "--decays", "never", "--run"],
    ],
    ids=lambda argv: argv[0],
)
def test_a_saved_model_is_no_run(command, saved, runs, tra):
    folder = runs / "tra" / "checkpoints" / "step-2"
    if saved == "converted":
        folder = runs / "converted"
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        convert(LlamaForCausalLM(LlamaConfig(vocab_size=20, **sizes)), "tra_plus").save_pretrained(folder)
    argv = [*command, folder] if command[-1] == "--run" else [command[0], folder, *command[1:]]
    refused(tra(*argv), "is not a run folder", "it is a saved model, which `tra train --from` makes a run of")
