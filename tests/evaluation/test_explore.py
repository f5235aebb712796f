"""`model.explore`: any model of ours on any ids."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from traformer.errors import InputError
from traformer.evaluation.exploration import decode_kept, decode_rows
from traformer.evaluation.explore import explore_model
from traformer.layers import threshold_relative
from traformer.models import TraformerConfig, TraformerForCausalLM, convert


def small(attention: Any) -> TraformerForCausalLM:
    torch.manual_seed(0)
    config = TraformerConfig(
        attention=attention, vocab_size=20, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attention_dropout=0.5, hidden_dropout=0.5,
    )  # fmt: skip
    return TraformerForCausalLM(config)


def converted_gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return convert(GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=32, n_layer=2, n_head=4, n_positions=16)), "tra")


@pytest.mark.parametrize(
    "attention", ["tra", "tra_plus", "tra_distance_only", "tra_ordinary_distance", "rope", ["rope", "tra_plus"]]
)
def test_the_weights_are_those_that_the_model_returns(attention: Any) -> None:
    model = small(attention).eval()
    ids = torch.arange(1, 12)
    view = explore_model(model, ids).runs[0].views[0]
    with torch.no_grad():
        wanted = model(ids[None], output_attentions=True, use_cache=False).attentions
    for layer, heads in zip(wanted, view.layers, strict=True):
        for head, coded in enumerate(heads):
            for query, row in zip(view.queries, decode_rows(coded, view), strict=True):
                for key in range(len(ids)):
                    assert row.get(key, 0.0) == pytest.approx(float(layer[0, head, query, key]), abs=1.1e-4)


def test_a_converted_model() -> None:
    model = converted_gpt2()
    view = explore_model(model, [3, 4, 5, 3]).runs[0].views[0]
    kept = decode_kept(view.layers[1][2], view)
    assert kept is not None and kept.shape == (4, 4) and not kept[0, 1:].any()


def test_the_map_is_made_once_per_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    whole = threshold_relative.attention_map
    monkeypatch.setattr(threshold_relative, "attention_map", lambda *a, **b: made.append(1) or whole(*a, **b))
    explore_model(small("tra"), [1, 2, 3])
    assert len(made) == 2


def test_the_model_stays_in_its_mode_and_dropout_is_off() -> None:
    model = small("tra")
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    first, second = (explore_model(model, [1, 2, 3, 4]).to_dict() for _ in range(2))
    assert first == second
    assert [module.training for module in model.modules()] == modes and any(modes)


def test_answers_are_compared_with_the_predictions() -> None:
    model = small("tra").eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    view = explore_model(model, ids, answers=torch.tensor([True, False, True, False])).runs[0].views[0]
    with torch.no_grad():
        predicted = int(model(ids).logits[0, 1].argmax())
    assert [(answer.place, answer.truth, answer.predicted) for answer in view.answers] == [(2, 7, predicted)]


@pytest.mark.parametrize(
    ("ids", "more", "sentence"),
    [
        ([], {}, "input_ids must be one sequence, [length] or [1, length], not [0]"),
        ([[1, 2], [3, 4]], {}, "input_ids must be one sequence"),
        ([1, 99], {}, "input_ids holds the id 99"),
        ([1.5, 2.0], {}, "input_ids must be whole numbers"),
        ([1, 2, 3], {"answers": [True]}, "answers has 1 places, input_ids 3"),
    ],
)
def test_what_cannot_be_shown_is_one_sentence(ids: Any, more: Any, sentence: str) -> None:
    with pytest.raises(InputError, match=re.escape(sentence)):
        small("tra").explore(torch.tensor(ids), **more)


def test_a_model_without_weights_is_refused() -> None:
    with pytest.raises(InputError, match="weighs no keys, so there is nothing to explore in this model"):
        small("lstm").explore([1, 2])
