"""`tra convert`: from a folder to a folder that loads like any model, and a sentence for what cannot be converted."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import traformer.models  # noqa: F401  # registers converted models
from traformer.cli import main
from traformer.layers import ThresholdRelativeAttention


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "llama"
    torch.manual_seed(0)
    sizes = {"vocab_size": 29, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, bos_token_id=None, eos_token_id=None)).save_pretrained(folder)
    return folder


def test_converted_to_rope_it_computes_what_the_source_did(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(llama), "--attention", "rope", "--out", str(tmp_path / "new")]) == 0
    assert "attention rope" in capsys.readouterr().out
    ids = torch.randint(29, (1, 20))
    old, new = (AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (llama, tmp_path / "new"))
    with torch.no_grad():
        torch.testing.assert_close(new(ids).logits, old(ids).logits, rtol=1e-4, atol=1e-5)


def test_options_reach_the_attention(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "new"
    command = ["convert", str(llama), "--attention", "tra", "--attention-option", "threshold=0.5", "--out", str(out)]
    assert main(command) == 0
    assert AutoModelForCausalLM.from_pretrained(out).config.attention_options["threshold"] == 0.5


@pytest.mark.parametrize(("more", "norm"), [([], True), (["--qk-norm"], True), (["--no-qk-norm"], False)])
def test_scores_may_stay_as_they_are(llama: Path, tmp_path: Path, more: list[str], norm: bool) -> None:
    out = tmp_path / "new"
    assert main(["convert", str(llama), "--attention", "tra", *more, "--out", str(out)]) == 0
    assert AutoModelForCausalLM.from_pretrained(out).config.qk_norm in (norm, [norm, norm])


def test_one_attention_for_each_layer(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "new"
    assert main(["convert", str(llama), "--attention", "rope,tra_plus", "--out", str(out)]) == 0
    layers = AutoModelForCausalLM.from_pretrained(out).base_model.attention_layers
    assert [isinstance(layer, ThresholdRelativeAttention) for layer in layers] == [False, True]


@pytest.mark.parametrize(
    ("model", "more", "sentence"),
    [
        ("LLAMA", ["--attention", "ropee"], "unknown attention 'ropee'; did you mean 'rope'?"),
        ("LLAMA", ["--attention-option", "thresold=1"], "'thresold'"),
        ("LLAMA", ["--attention-option", "qk_norm=true"], "'qk_norm', unknown to attention"),
        ("LLAMA", ["--attention-option", "copy=true"], "'copy', unknown to attention"),
        (
            "LLAMA",
            [f"--attention-option=threshold={n}" for n in (0.1, 0.2)],
            "threshold is given twice, as 0.1 and 0.2",
        ),
        ("missing.gguf", [], "there is no GGUF file missing.gguf"),
        ("./nowhere", [], "./nowhere is neither a model's folder nor a GGUF file"),
        ("EMPTY", [], "is not a model's folder: it has no config.json"),
        ("BROKEN", [], "cannot be loaded as a causal language model"),
        ("CUT", [], "cannot be loaded as a causal language model"),
        ("CUT_GGUF", [], "cannot be loaded as a causal language model"),
        ("LLAMA", ["--keep-positions"], "keep_positions is for models that add learned positions"),
    ],
)
def test_what_cannot_be_converted_is_said_in_one_sentence(
    model: str, more: list[str], sentence: str, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"model_type": "llama"')
    places = {"LLAMA": str(llama), "EMPTY": str(tmp_path / "empty"), "BROKEN": str(tmp_path / "broken")}
    shutil.copytree(llama, tmp_path / "cut")
    os.truncate(tmp_path / "cut" / "model.safetensors", 2000)
    (tmp_path / "cut.gguf").write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(10))
    places |= {"CUT": str(tmp_path / "cut"), "CUT_GGUF": str(tmp_path / "cut.gguf")}
    out = tmp_path / "new"
    assert main(["convert", places.get(model, model), *more, "--out", str(out)]) == 2
    said = capsys.readouterr().err
    assert sentence in said and said.startswith("tra: error: ") and len(said.splitlines()) == 1
    assert not out.exists()


def test_a_folder_with_something_in_it_is_left_alone(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kept.txt").write_text("mine")
    assert main(["convert", str(llama), "--out", str(tmp_path)]) == 2
    assert "is there already; choose another --out" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["kept.txt"]
