"""Recall with a window in one layer: against plain passes, against converted layers, and a model with one layer."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from tests.training.tiny_llama import text_folder, tiny_llama
from traformer.cli import main
from traformer.data.tokenizers import FastTokenizer
from traformer.errors import InputError
from traformer.evaluation.recall_at_depth import make_facts, plant
from traformer.evaluation.recall_by_layer import recall_by_layer
from traformer.models.conversion.convert import convert

LENGTH, WINDOW, FACTS = 300, 40, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def llama(folder):
    return LlamaForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def tokenizer(folder):
    return FastTokenizer(AutoTokenizer.from_pretrained(folder).backend_tokenizer, "tiny")


TEXT = np.random.default_rng(0).integers(1, 200, size=2000)


def recall(model, tokenizer, **changes):
    options = {"length": LENGTH, "window": WINDOW, "facts": FACTS, "texts": 1, **changes}
    return recall_by_layer(model, tokenizer, TEXT, **options)


def one_by_one(model, tokenizer) -> float:
    """Mean log probability of the answers' tokens, each question in a pass of its own through the whole model."""
    facts = make_facts(FACTS, seed=0)
    ids, _ = plant(tokenizer, TEXT[:LENGTH], facts, LENGTH)
    found = []
    for fact in facts:
        question, answer = tokenizer.encode(f"\n{fact.question}"), tokenizer.encode(fact.answer)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*ids, *question, *answer]])).logits[0]
        predicted = logits.log_softmax(-1)[-len(answer) - 1 : -1]
        found += [float(predicted[place, token]) for place, token in enumerate(answer)]
    return sum(found) / len(found)


def test_all_questions_in_one_pass_are_as_one_by_one(llama, tokenizer):
    assert recall(llama, tokenizer).whole.log_probability == pytest.approx(one_by_one(llama, tokenizer), abs=1e-4)


def test_windows_are_those_of_a_converted_model(llama, tokenizer):
    windowed = convert(llama, "rope", sliding_window=WINDOW).eval()
    found = recall(llama, tokenizer, sinks=0)
    assert found.windowed.log_probability == pytest.approx(one_by_one(windowed, tokenizer), abs=1e-4)
    assert abs(found.windowed.log_probability - found.whole.log_probability) > 1e-3  # else this would show nothing


def test_the_one_layer_that_attends_is_found(folder, tokenizer):
    model = LlamaForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        for index, layer in enumerate(model.model.layers):
            if index != 2:
                layer.self_attn.o_proj.weight.zero_()
    found = recall(model, tokenizer)
    assert [one == found.whole for one in found.without] == [True, True, False, True]
    assert found.without[2] == found.windowed
    if found.windowed.log_probability < found.whole.log_probability:
        assert found.chosen == [2]
        assert found.only_chosen == found.whole
        assert found.pattern("tra") == "rope,rope,tra,rope"
    assert len(recall(model, tokenizer, count=3).chosen) == 3
    assert not any(layer.self_attn._forward_pre_hooks for layer in model.model.layers)


def test_what_cannot_be_measured_is_refused(llama, tokenizer):
    with pytest.raises(InputError, match="between 1 and 4, not 5"):
        recall(llama, tokenizer, count=5)
    with pytest.raises(InputError, match="shorter than the text"):
        recall(llama, tokenizer, window=LENGTH)
    with pytest.raises(InputError, match="9 texts of 300 tokens need a longer text"):
        recall(llama, tokenizer, texts=9)
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, n_positions=LENGTH, vocab_size=300)).eval()
    with pytest.raises(InputError, match="has 300 positions; give a text shorter"):
        recall(gpt2, tokenizer)
    assert len(recall(gpt2, tokenizer, length=250).without) == 2
    with pytest.raises(InputError, match="of no family"):
        recall(BertModel(BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)), tokenizer)


def test_the_command_prints_a_pattern(folder, tmp_path, capsys):
    text = str(text_folder(tmp_path / "text"))
    command = ["layers", str(folder), "--data", text, "--length", "600", "--texts", "1", "--threads", "1"]
    assert main(command) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.count("tra_straight_through") == 1 and last.count("rope") == 3
    assert main([*command, "--json", "--count", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["chosen"]) == 2 and found["attention"].split(",")[found["chosen"][0]] == "tra_straight_through"
    assert main([*command, "--attention", "tru"]) == 2
    assert "unknown attention 'tru'" in capsys.readouterr().err
