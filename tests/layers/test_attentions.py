"""The matrix: every attention and every named configuration, whatever it is, keeps these promises.

Compile, export, autocast and the Hugging Face side are tested for every attention in tests/models.
"""

from __future__ import annotations

import pytest
import torch

from tests.models import common
from tests.models.common import check_decoding
from traformer.errors import InputError
from traformer.methods import METHODS
from traformer.models import TraformerConfig, TraformerForCausalLM

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
# Options that bite only at lengths of their own, here at those of the tests.
WINDOW = {"sliding_window": 3, "exclude_self": "half", "temperature": True}
SPECIAL = {
    "rope, window 3": ("rope", {"sliding_window": 3}),
    "rope, window 3, sinks, own key": ("rope", {"sliding_window": 3, "sinks": 2}),
    "rope, window 3 and sinks": ("rope", {"sliding_window": 3, "sinks": 2, "exclude_self": "half"}),
    "alibi, window 3": ("alibi", WINDOW),
    "fot, window 3": ("fot", WINDOW),
    "t5, window 3": ("t5", WINDOW),
    "differential, window 3": ("differential", WINDOW),
    "stick_breaking, window 3": ("stick_breaking", {"sliding_window": 3}),
    "nope, no head sees its own key": ("nope", {"exclude_self": True}),
    "alibi, previous tokens, window 3": ("alibi", {"previous_heads": [False, True, False], "sliding_window": 3}),
    "tra, previous tokens": ("tra", {"previous_heads": [False, True, False], "temperature": True}),
    "tra without removal, previous tokens": ("tra_variant", {"previous_heads": [True, False, True], "removal": False}),
}
NAMES = [*METHODS, *SPECIAL]
NAMED = [name for name, method in METHODS.items() if method.is_configuration]


def small_model(name: str, **overrides) -> TraformerForCausalLM:
    if name in SPECIAL:
        name, overrides["attention_options"] = SPECIAL[name]
    sizes = {"vocab_size": 19, "hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 1}
    return common.small_model(name, **sizes, **overrides)


def tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(1, 19, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_tiny_lengths_and_causality(name):
    """What a prefix gives does not depend on what follows, down to a single token."""
    model, x = small_model(name), tokens(2, 9)
    full = model(x, use_cache=False).logits
    assert full.isfinite().all()
    for length in (1, 2, 7, 8):
        torch.testing.assert_close(model(x[:, :length], use_cache=False).logits, full[:, :length], **CLOSE)


@pytest.mark.parametrize("name", SPECIAL)
@torch.no_grad()
def test_decoding_without_padding_equals_one_forward(name):
    model, x = small_model(name), tokens(2, 14)
    full = model(x, use_cache=False).logits
    for sizes in ([2, *[1] * 12], [1, 5, 2, 6], [9, 5]):
        cache, rows = None, []
        for part in x.split(sizes, dim=1):
            found = model(part, past_key_values=cache, use_cache=True)
            cache = found.past_key_values
            rows.append(found.logits)
        torch.testing.assert_close(torch.cat(rows, dim=1), full, **CLOSE)


@pytest.mark.parametrize(("sinks", "most"), [(0, 3), (2, 5)])
@torch.no_grad()
def test_a_token_reads_no_more_keys_than_its_window(sinks, most, monkeypatch):
    """However long the cache is: nothing is copied that the token does not see."""
    from traformer.layers import rope, softmax

    read, copied = [], []
    attention, expand = torch.nn.functional.scaled_dot_product_attention, softmax.expand_heads

    def counted(q, k, *rest, **named):
        read.append(k.shape[2])
        return attention(q, k, *rest, **named)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    for module in (rope, softmax):
        monkeypatch.setattr(module, "expand_heads", lambda x, heads: copied.append(x.shape[2]) or expand(x, heads))
    model = common.small_model("rope", attention_options={"sliding_window": 3, "sinks": sinks})
    cache = model(tokens(1, 20), use_cache=True).past_key_values
    for length in (1, 4):  # a token, and a chunk, which sees as many keys more
        read.clear(), copied.clear()
        cache = model(tokens(1, length), past_key_values=cache, use_cache=True).past_key_values
        assert read and max(read) == most + length - 1
        assert copied and max(copied) == most + length - 1


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_decoding_equals_one_forward(name):
    """A chunk, then token by token, in a batch of which one row is padded on the left."""
    check_decoding(small_model(name), tokens(2, 12), **CLOSE)


@pytest.mark.parametrize("name", NAMES)
def test_packing_equals_separate_sequences_gradients_too(name):
    parts, ends = [tokens(n, seed=n) for n in (5, 1, 8)], torch.tensor([0, 5, 6, 14], dtype=torch.int32)

    def run(model):
        packed = model(torch.cat(parts)[None], cu_seqlens=ends, use_cache=False).logits[0]
        return packed, torch.cat([model(part[None], use_cache=False).logits[0] for part in parts])

    with torch.no_grad():
        torch.testing.assert_close(*run(small_model(name)), **CLOSE)
    # Gradients in float64: a gate's may be a small difference of large sums; float32 rounds it as the processor does.
    model = small_model(name).double()
    outputs = run(model)
    parameters = [p for n, p in model.named_parameters() if "position_table.weight" not in n]
    weights = torch.randn(outputs[0].shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    grads = [torch.autograd.grad((out * weights).sum(), parameters) for out in outputs]
    for a, b in zip(*grads, strict=True):
        scale = b.abs().max().clamp(min=1e-6)
        torch.testing.assert_close(a / scale, b / scale, rtol=1e-6, atol=1e-6)
        assert b.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_learns(name):
    model, x = small_model(name, attention_dropout=0.1).train(), tokens(4, 40)
    model(x, labels=x).loss.backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), parameter_name
        assert parameter.grad.abs().max() > 0, parameter_name


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_long_inputs_in_blocks_equal_short_ones(name):
    """More queries than a block holds, in training's way (with gradients) and without."""
    model, x = small_model(name), tokens(1, 1200)
    full = model(x, use_cache=False).logits
    with torch.enable_grad():
        again = model(x, use_cache=False)
        again.logits.square().mean().backward()
        torch.testing.assert_close(again.logits.detach(), full, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(model(x[:, :400], use_cache=False).logits, full[:, :400], rtol=1e-3, atol=1e-3)
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", NAMED)
def test_a_named_configuration_is_saved_as_what_it_stands_for(name, tmp_path):
    model, x = small_model(name), tokens(2, 9)
    assert model.config.attention == METHODS[name].attention
    for option, value in METHODS[name].options.items():
        assert model.config.attention_options[option] == value
    model.save_pretrained(tmp_path)
    loaded = TraformerForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(loaded(x).logits, model(x).logits)
    assert loaded.config.attention_options == model.config.attention_options
    assert loaded.config.qk_norm == model.config.qk_norm


@pytest.mark.parametrize("name", ["tra_distance_only", "tra_forget_distance", "tra_learned_threshold"])
def test_eager_variants_are_one_graph(name):
    torch._dynamo.reset()
    model, x = small_model(name), tokens(2, 9)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, use_cache=False).logits, model(x, use_cache=False).logits)


def test_options_of_a_name_can_be_overridden():
    config = TraformerConfig(attention="tra_margin", attention_options={"margin": 0.5, "threshold": 0.1})
    assert config.attention == "tra_variant" and config.attention_options == {"margin": 0.5, "threshold": 0.1}


def test_biases_that_a_layer_wants_to_start_elsewhere():
    for block in small_model("tra_learned_threshold").model.layers:
        assert block.self_attn.threshold_proj.bias.eq(-2.0).all()
    for name, value in (("tra_slow_gate", 3.0), ("tra_fast_gate", -2.0), ("tra_far", 10.0)):
        for block in small_model(name).model.layers:
            assert block.self_attn.decay_proj.bias.eq(value).all()
    for block in small_model("tra_plus").model.layers:
        bias = block.self_attn.decay_proj.bias.tolist()
        half = len(bias) // 2
        assert bias == [-6.0] * half + [6.0] * (len(bias) - half)

    assert small_model("fot_equal").model.layers[1].self_attn.forget_proj.bias.tolist() == [-6.0, 6.0, 6.0]


@pytest.mark.parametrize("name", ["tra_temperature", "rope_equal", "stick_breaking_equal"])
def test_temperature_learns_faster(name):
    layer = small_model(name).model.layers[0].self_attn
    assert layer.temperature.lr_scale == 10.0 and layer.temperature.eq(0).all()


@pytest.mark.parametrize(
    ("attention", "options", "sentence"),
    [
        ("cope", {"npos_max": 1}, "npos_max must be a whole number from 2 on"),
        ("t5", {"buckets": 3}, "4 <= buckets < 2 \\* max_distance"),
        ("fire", {"hidden": 0}, "hidden must be a whole number above zero"),
        ("fot", {"tolerance": 1.5}, "tolerance must be a number in \\[0, 1\\)"),
        ("stick_breaking", {"remainder": "slef"}, "did you mean 'self'"),
        ("selective", {"position": "rop"}, "did you mean 'rope'"),
        ("learned", {"max_positions": 0}, "max_positions must be a whole number"),
        ("tra_variant", {"distance": "ordinry"}, "did you mean 'ordinary'"),
        ("tra_variant", {"distance": "none", "decay": "fixed"}, "decay 'fixed' is for contextual distance"),
        ("tra_variant", {"distance": "none", "gate_bias": 1.0}, "gate_bias needs a learned gate"),
        ("tra_variant", {"removal": False, "learned_threshold": True}, "removal=false only makes sense"),
        ("tra_variant", {"margin": -1}, "margin must be a finite number >= 0"),
        ("tra_variant", {"gate_bias": "fast"}, 'a list of numbers or "halves", got'),
        ("tra_variant", {"gate_bias": [1.0]}, "gate_bias has 1 entries, but the layer has"),
        ("tra_variant", {"straight_through": 1}, "straight_through must be true or false"),
        ("tra_no_qk_nrm", {}, "did you mean 'tra_no_qk_norm'"),
        ("rope", {"npos_max": 3}, "unknown to attention 'rope'"),
        ("rope", {"sliding_window": 0}, "sliding_window must be a whole number above zero"),
        ("rope", {"sliding_window": 8, "sinks": -1}, "sinks must be a whole number, 0 or more"),
        ("rope", {"sinks": 2}, "sinks goes with sliding_window"),
        ("alibi", {"exclude_self": "third"}, 'exclude_self must be true, false, "half"'),
        ("alibi", {"previous_heads": "third"}, 'previous_heads must be true, false, "half"'),
        ("tra", {"previous_heads": [True]}, "previous_heads has 1 entries, but the layer has"),
        ("nope", {"temperature": 2.0}, "temperature must be true or false"),
        ("fot", {"gate_bias": "fast"}, 'a list of numbers or "halves", got'),
    ],
)
def test_bad_options_are_one_sentence(attention, options, sentence):
    with pytest.raises(InputError, match=sentence):
        TraformerConfig(attention=attention, attention_options=options)


def test_positions_beyond_the_learned_table_are_an_error():
    model = small_model("learned", attention_options={"max_positions": 8})
    with pytest.raises(InputError, match="position 8 is beyond the 8 learned positions"):
        model(tokens(1, 9))
