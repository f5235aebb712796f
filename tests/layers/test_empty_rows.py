"""Queries that keep nothing: told apart at long contexts without reading all keys, with the same result."""

from __future__ import annotations

import pytest
import torch

from traformer.layers import ThresholdRelativeAttention, threshold_relative
from traformer.models import TraformerConfig, TraformerForCausalLM

SIZES = {"vocab_size": 7, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def model_of_few_tokens(**changes) -> TraformerForCausalLM:
    """The first seed in which some token keeps nothing in the first layer."""
    torch.manual_seed(4)
    return TraformerForCausalLM(TraformerConfig(attention="tra", **{**SIZES, **changes})).eval()


def read_in_chunks(model, ids, chunk=100):
    """Hidden states, and for each layer the keys read and kept by the last chunk's queries."""
    cache = model.model.new_cache()
    stats, hidden = {}, []
    layers = [m for m in model.modules() if isinstance(m, ThresholdRelativeAttention)]
    with torch.inference_mode():
        for begin in range(0, ids.shape[1], chunk):
            for layer in layers:
                attend = type(layer).attend.__get__(layer)

                def counted(q, k, v, x, context, layer=layer, attend=attend):
                    stats[layer.layer_idx] = layer.reads(q, k, x, context)
                    return attend(q, k, v, x, context)

                layer.attend = counted
            hidden.append(model.model(ids[:, begin : begin + chunk], past_key_values=cache).last_hidden_state)
    for layer in layers:
        del layer.attend
    return torch.cat(hidden, 1), stats, cache


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_key_value_heads": 2},
        {"qk_norm": False},
        {"attention_options": {"exclude_self": "half", "threshold": 0.3, "temperature": True}},
        {"attention_options": {"backend": "blockwise"}},
    ],
)
def test_the_result_is_the_same_and_less_is_read(changes, monkeypatch):
    model, ids = model_of_few_tokens(**changes), torch.randint(1, 7, (2, 1000))
    expected, plain, _ = read_in_chunks(model, ids)
    monkeypatch.setattr(threshold_relative, "BALLS_FROM", 300)
    found, stats, cache = read_in_chunks(model, ids)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert cache.layers[0].key_balls.proven > 0
    for layer in (0, 1):
        assert torch.equal(stats[layer].kept == 0, plain[layer].kept == 0)
    own_heads = slice(2, 4) if "exclude_self" in changes.get("attention_options", {}) else slice(0, 4)
    empty = (plain[0].kept == 0)[:, own_heads]
    assert empty.any() and plain[0].read[:, own_heads][empty].min() > 800
    assert stats[0].read[:, own_heads][empty].max() < 450  # as far as the rows go that are read along with it
    assert stats[0].read.sum() < 0.75 * plain[0].read.sum()


def test_where_it_does_not_apply(monkeypatch):
    """Training, tolerance 0 (every key is read), few queries, a cut and a reordered cache."""
    monkeypatch.setattr(threshold_relative, "BALLS_FROM", 300)
    ids = torch.randint(1, 7, (2, 1000))
    _, stats, cache = read_in_chunks(model_of_few_tokens(attention_options={"tolerance": 0.0}), ids)
    assert cache.layers[0].key_balls is None and stats[0].read.min() == 901
    model = model_of_few_tokens()
    cache = model.model.new_cache()
    model(ids, past_key_values=cache)
    assert cache.layers[0].key_balls is None  # gradients are asked for
    with torch.no_grad():
        model(ids[:, :10], past_key_values=cache)
        assert cache.layers[0].key_balls is None  # too few to pay
        model(ids[:, :100], past_key_values=cache)
        assert cache.layers[0].key_balls.length == 1110
        cache.crop(-200)
        assert cache.layers[0].key_balls.length == 910
        model(ids[:, :100], past_key_values=cache)
        assert cache.layers[0].key_balls.length == 1010
        cache.reorder_cache(torch.tensor([1, 0]))
        assert cache.layers[0].key_balls is None
        swapped = model(ids.flip(0)[:, :100], past_key_values=cache).logits
        whole = model(torch.cat((ids[:, :910], ids[:, :100], ids[:, :100]), 1).flip(0)).logits
    torch.testing.assert_close(swapped, whole[:, -100:], rtol=1e-4, atol=1e-4)
