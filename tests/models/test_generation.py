"""Cache and generation, for every attention: whatever way the tokens come, the result is that of one forward."""

from __future__ import annotations

import copy
import logging
import runpy
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache, StaticCache

from tests.models.common import small_model, tokens
from traformer.errors import InputError
from traformer.models import TraformerCache

CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def caches(model, length):
    return {
        "ours": lambda: TraformerCache(model.config),
        "dynamic": lambda: DynamicCache(config=model.config),
        "lazy": lambda: DynamicCache(),
        "static": lambda: StaticCache(config=model.config, max_cache_len=length + 5),
    }


@torch.no_grad()
def in_chunks(model, x, sizes, cache, **kwargs):
    """Logits of x given to the model piece by piece."""
    logits, start = [], 0
    mask = kwargs.pop("attention_mask", None)
    for size in sizes:
        end = start + size
        if mask is not None:
            kwargs["attention_mask"] = mask[:, :end]
        logits.append(model(x[:, start:end], past_key_values=cache, use_cache=True, **kwargs).logits)
        start = end
    assert start == x.shape[1]
    return torch.cat(logits, 1)


@pytest.mark.parametrize("kind", ["ours", "dynamic", "lazy", "static"])
@pytest.mark.parametrize("sizes", [[1] * 29, [29], [13, 1, 1, 9, 5], [28, 1]], ids=str)
def test_token_by_token_equals_one_forward(attention, kind, sizes):
    model, x = small_model(attention), tokens(length=29)
    cache = caches(model, 29)[kind]()
    torch.testing.assert_close(in_chunks(model, x, sizes, cache), model(x).logits, **CLOSE)
    assert int(cache.get_seq_length()) == 29


@pytest.mark.parametrize("kind", ["ours", "dynamic", "static"])
def test_ragged_batch_with_left_padding(attention, kind):
    model, x = small_model(attention), tokens(batch=3, length=20)
    lengths = [20, 7, 1]
    mask = torch.zeros(3, 20, dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, 20 - length :] = 1
    logits = in_chunks(model, x, [8, 1, 1, 10], caches(model, 20)[kind](), attention_mask=mask)
    for row, length in enumerate(lengths):
        alone = model(x[row : row + 1, 20 - length :]).logits
        torch.testing.assert_close(logits[row : row + 1, 20 - length :], alone, **CLOSE)


def greedy_by_hand(model, x, count):
    for _ in range(count):
        x = torch.cat([x, model(x, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return x


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"cache_implementation": "dynamic"},
        {"cache_implementation": "static"},
        {"use_cache": False},
        {"prefill_chunk_size": 4},
        {"prefill_chunk_size": 4, "cache_implementation": "static"},
    ],
    ids=str,
)
def test_greedy(attention, settings):
    model, x = small_model(attention), tokens(length=11)
    result = model.generate(x, max_new_tokens=9, do_sample=False, **settings)
    assert torch.equal(result, greedy_by_hand(model, x, 9))


@pytest.mark.parametrize("static", [False, True])
def test_greedy_ragged(attention, static):
    model, x = small_model(attention), tokens(batch=2, length=12)
    x[1, :5] = 0
    mask = (x != 0).long()
    settings = {"cache_implementation": "static"} if static else {}
    result = model.generate(x, attention_mask=mask, max_new_tokens=8, do_sample=False, **settings)
    assert torch.equal(result[:1], greedy_by_hand(model, x[:1], 8))
    assert torch.equal(result[1:, 5:], greedy_by_hand(model, x[1:, 5:], 8))


def test_sampling_is_the_same_with_and_without_a_cache(attention):
    model, x = small_model(attention), tokens(length=6)
    results = []
    for use_cache in (True, False):
        torch.manual_seed(5)
        results.append(model.generate(x, max_new_tokens=12, do_sample=True, top_k=8, use_cache=use_cache))
    assert torch.equal(*results)


def test_beam_search(attention):
    model, x = small_model(attention), tokens(length=6)
    settings = {"max_new_tokens": 8, "num_beams": 3, "do_sample": False}
    expected = model.generate(x, use_cache=False, **settings)
    assert torch.equal(model.generate(x, **settings), expected)
    assert torch.equal(model.generate(x, cache_implementation="static", **settings), expected)


def test_continuing_a_conversation(attention):
    """A second call goes on from the first one's cache: with all tokens, as transformers has it."""
    model, x = small_model(attention), tokens(length=8)
    first = model.generate(x, max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
    assert isinstance(first.past_key_values, TraformerCache)
    asked = torch.cat([first.sequences, tokens(length=4, seed=9)], 1)
    second = model.generate(
        asked,
        attention_mask=torch.ones_like(asked),
        past_key_values=first.past_key_values,
        max_new_tokens=5,
        do_sample=False,
    )
    assert torch.equal(second, greedy_by_hand(model, asked, 5))


def test_crop_and_go_on(attention):
    model, x = small_model(attention), tokens(length=16)
    cache = TraformerCache(model.config)
    with torch.no_grad():
        model(x, past_key_values=cache)
        cache.crop(-6)
        assert cache.get_seq_length() == 10
        other = tokens(length=5, seed=8)
        logits = model(other, past_key_values=cache).logits
        torch.testing.assert_close(logits, model(torch.cat([x[:, :10], other], 1)).logits[:, 10:], **CLOSE)


def test_prefix_is_read_once(attention):
    """One prefix, several continuations, in one batch and one by one."""
    model, prefix = small_model(attention), tokens(batch=1, length=14)
    endings = tokens(batch=3, length=4, seed=4)
    cache = TraformerCache(model.config)
    with torch.no_grad():
        model(prefix, past_key_values=cache)
        together = model(endings, past_key_values=cache.repeat(3)).logits
        expected = model(torch.cat([prefix.expand(3, -1), endings], 1)).logits[:, 14:]
        torch.testing.assert_close(together, expected, **CLOSE)
        for row in range(3):
            for copied in (cache.cut(0), copy.deepcopy(cache)):
                logits = model(endings[row : row + 1], past_key_values=copied).logits
                torch.testing.assert_close(logits, expected[row : row + 1], **CLOSE)
    assert cache.get_seq_length() == 14


def test_joined_caches_are_read_as_one():
    """Two texts read apart, joined: a token then sees both, as under a mask that keeps the texts apart."""
    model = small_model("tra", num_hidden_layers=1)
    first, second, question = tokens(1, 9), tokens(1, 6, seed=2), tokens(1, 3, seed=3)
    pieces = []
    with torch.no_grad():
        for text in (first, second):
            pieces.append(TraformerCache(model.config))
            model(text, past_key_values=pieces[-1])
        joined = TraformerCache.join(pieces)
        logits = model(question, past_key_values=joined).logits
        # In a one-layer model keys do not depend on what was read before, so this is a plain forward.
        torch.testing.assert_close(logits, model(torch.cat([first, second, question], 1)).logits[:, 15:], **CLOSE)
        # And a text can be taken out again.
        again = TraformerCache.join([pieces[0].cut(0, 4), pieces[0].cut(6), pieces[1]])
        rest = torch.cat([first[:, :4], first[:, 6:], second, question], 1)
        torch.testing.assert_close(model(question, past_key_values=again).logits, model(rest).logits[:, -3:], **CLOSE)


def test_cut_and_join_are_refused_where_keys_carry_positions():
    model = small_model("rope")
    cache = TraformerCache(model.config)
    with torch.no_grad():
        model(tokens(1, 6), past_key_values=cache)
    assert cache.cut(0, 3).get_seq_length() == 3
    with pytest.raises(InputError, match="carry their position: its cache can only be cut from 0"):
        cache.cut(2)
    with pytest.raises(InputError, match="cannot be joined"):
        TraformerCache.join([cache, cache])
    with pytest.raises(InputError, match="is not within the 6 tokens"):
        cache.cut(0, 7)


def test_the_cache_grows_by_doubling():
    model = small_model("tra")
    cache = TraformerCache(model.config)
    layer = cache.layers[0]
    copies, capacity = 0, 0
    with torch.no_grad():
        for step in range(100):
            model(tokens(1, 1, seed=step), past_key_values=cache)
            copies += layer.capacity != capacity
            capacity = layer.capacity
            assert layer.keys.shape[2] == layer.values.shape[2] == step + 1
    assert copies <= 9 and capacity < 256


def test_a_cache_lets_gradients_through(attention):
    """Keys that need a gradient are appended, not written over: the gradient is that of one forward."""
    model, x = small_model(attention), tokens(length=9)
    model(x, labels=x, use_cache=False).logits[:, 5:].pow(2).sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    cache = TraformerCache(model.config)
    model(x[:, :5], past_key_values=cache)
    model(x[:, 5:], past_key_values=cache).logits.pow(2).sum().backward()
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-3, atol=1e-3)


def test_inference_mode_cache_can_be_used_outside(attention):
    model, x = small_model(attention), tokens(length=9)
    cache = TraformerCache(model.config)
    with torch.inference_mode():
        model(x[:, :5], past_key_values=cache)
    with torch.no_grad():
        logits = model(x[:, 5:], past_key_values=cache).logits
        torch.testing.assert_close(logits, model(x).logits[:, 5:], **CLOSE)


def test_bad_prompts():
    model = small_model()
    cases = [
        ({"inputs": torch.zeros(1, 0, dtype=torch.long)}, "the prompt is empty"),
        ({}, "the prompt is empty"),
        ({"inputs": torch.tensor([[1, 99]])}, "the id 99, but the vocabulary has ids 0 to 22"),
        ({"inputs": [[1, 2], [3]]}, "different lengths and no mask"),
        ({"inputs": [[1, 2], [3, 4]]}, "must be a tensor"),
        (
            {"inputs": torch.ones(2, 3, dtype=torch.long), "attention_mask": torch.tensor([[1, 1, 1], [0, 0, 0]])},
            "a row without a real token",
        ),
        ({"inputs": torch.ones(1, 3, dtype=torch.long), "max_new_tokens": 10**12}, "GiB of cache"),
    ]
    for kwargs, sentence in cases:
        with pytest.raises(InputError, match=sentence) as error:
            model.generate(**{"max_new_tokens": 2, **kwargs})
        assert "\n" not in str(error.value)
    with pytest.raises(InputError, match="the id -1"):
        model(torch.tensor([[-1]]))
    with pytest.raises(InputError, match="input_ids is empty"):
        model(torch.zeros(1, 0, dtype=torch.long))
    with pytest.raises(InputError, match=r"attention_mask must be \[1, 4\]"):
        cache = TraformerCache(model.config)
        model(tokens(1, 3), past_key_values=cache)
        model(tokens(1, 1), past_key_values=cache, attention_mask=torch.ones(1, 1))
    with pytest.raises(InputError, match="a batch of 1, but the new tokens are a batch of 2"):
        model(tokens(2, 1), past_key_values=cache)


@pytest.mark.parametrize("rows", [1, 2])
def test_right_padding_is_a_warning(rows, caplog, monkeypatch):
    """As in transformers; what follows the padding is what one forward over the same mask gives."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    model, x = small_model(), tokens(rows, 6)
    mask = torch.ones_like(x)
    mask[-1, 4:] = 0
    with caplog.at_level(logging.WARNING):
        result = model.generate(x, attention_mask=mask, max_new_tokens=1, do_sample=False, pad_token_id=0)
        assert len({record.message for record in caplog.records if "padd" in record.message}) == 1
    with torch.no_grad():
        logits = model(x, attention_mask=mask, past_key_values=model.model.new_cache()).logits
    assert torch.equal(result[:, -1], logits[:, -1].argmax(-1))
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        model.generate(x, attention_mask=mask.flip(1), max_new_tokens=1, do_sample=False, pad_token_id=0)
    assert not caplog.records


def test_the_shared_prefix_example_runs(monkeypatch, capsys):
    path = Path(__file__).parents[2] / "examples" / "shared_prefix.py"
    monkeypatch.setattr("sys.argv", ["shared_prefix.py", "--prefix", "64", "--questions", "3"])
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.count("same logits as the plain forward") == 2


@pytest.fixture
def index_from_the_start(monkeypatch):
    """TRA uses the cache's key index at any length, not only where it pays."""
    backends = pytest.importorskip("traformer.ops").available_backends()
    if "cpu" not in backends:
        pytest.skip("the index is for the compiled kernel")
    monkeypatch.setattr("traformer.layers.threshold_relative.INDEX_FROM", 0)


@torch.no_grad()
def test_the_key_index_stays_in_step(index_from_the_start):
    model = small_model("tra")
    x = tokens(batch=2, length=300)
    expected = model(x, use_cache=False).logits
    cache = TraformerCache(model.config)
    torch.testing.assert_close(in_chunks(model, x, [130, 1, 1, 63, 64, 1, 40], cache), expected, **CLOSE)
    index = cache.layers[1].key_index
    assert index is not None and index.length == 300
    cache.crop(-100)  # back, on another way, with rows changed as beam search changes them
    assert index.length == 200
    order = torch.tensor([1, 0])
    cache.reorder_cache(order)
    other = tokens(batch=2, length=70, seed=5)
    logits = in_chunks(model, other, [1, 66, 3], cache)
    torch.testing.assert_close(logits, model(torch.cat([x[order, :200], other], 1)).logits[:, 200:], **CLOSE)
    repeated = cache.repeat(2)
    more = tokens(batch=4, length=3, seed=6)
    whole = torch.cat([x[order, :200], other], 1).repeat_interleave(2, dim=0)
    logits = in_chunks(model, more, [1, 2], repeated)
    torch.testing.assert_close(logits, model(torch.cat([whole, more], 1)).logits[:, 270:], **CLOSE)


def test_the_key_index_leaves_inference_mode(index_from_the_start):
    model, x = small_model("tra"), tokens(length=90)
    cache = TraformerCache(model.config)
    with torch.inference_mode():
        model(x[:, :70], past_key_values=cache)
    with torch.no_grad():
        logits = in_chunks(model, x[:, 70:], [1, 19], cache)
        torch.testing.assert_close(logits, model(x).logits[:, 70:], **CLOSE)


def test_generation_with_the_key_index(index_from_the_start):
    model, x = small_model("tra"), tokens(length=90)
    for settings in ({"do_sample": False}, {"do_sample": False, "num_beams": 3}):
        expected = model.generate(x, max_new_tokens=50, use_cache=False, **settings)
        assert torch.equal(model.generate(x, max_new_tokens=50, **settings), expected)
