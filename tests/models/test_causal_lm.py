"""The model itself, for every attention: loss, saving, residual, dropout, compile."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from tests.models.common import small_model, tokens
from traformer.errors import InputError
from traformer.models import TraformerConfig, TraformerForCausalLM


def test_loss_shifts_and_skips(attention):
    model, x = small_model(attention), tokens()
    labels = x.clone()
    labels[:, :5] = -100
    output = model(x, labels=labels)
    expected = F.cross_entropy(output.logits[:, 4:-1].flatten(0, 1), x[:, 5:].flatten())
    torch.testing.assert_close(output.loss, expected)


def test_causal(attention):
    model, x = small_model(attention), tokens()
    changed = x.clone()
    changed[:, 9:] = 3
    assert torch.equal(model(x).logits[:, :9], model(changed).logits[:, :9])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_save_and_load_are_bit_equal(attention, dtype, tmp_path):
    model = small_model(attention).to(dtype)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    x = tokens()
    for cls in (TraformerForCausalLM, AutoModelForCausalLM):
        loaded = cls.from_pretrained(tmp_path, dtype="auto")
        assert type(loaded) is TraformerForCausalLM and loaded.dtype == dtype
        with torch.no_grad():
            assert torch.equal(loaded(x).logits, model(x).logits)


def test_logits_to_keep(attention):
    model, x = small_model(attention), tokens()
    full = model(x).logits
    torch.testing.assert_close(model(x, logits_to_keep=2).logits, full[:, -2:])
    torch.testing.assert_close(model(x, logits_to_keep=torch.tensor([3, 5])).logits, full[:, [3, 5]])


def test_hidden_states_and_tuple(attention):
    model, x = small_model(attention), tokens()
    output = model(x, output_hidden_states=True)
    assert len(output.hidden_states) == 3
    torch.testing.assert_close(model.lm_head(output.hidden_states[-1]), output.logits)
    assert torch.equal(model(x, return_dict=False)[0], output.logits)


def test_residual_choices_differ_where_they_should():
    x = tokens()
    normed, prenorm = small_model(residual="normed"), small_model(residual="prenorm")
    prenorm.load_state_dict(normed.state_dict())
    assert not torch.allclose(normed(x).logits, prenorm(x).logits)
    with torch.no_grad():  # with blocks that add nothing, pre-norm leaves the embedding as it is
        for model in (normed, prenorm):
            for block in model.model.layers:
                for linear in (block.self_attn.o_proj, block.mlp.out_proj):
                    linear.weight.zero_()
                    linear.bias.zero_()
        embedded = prenorm.get_input_embeddings()(x)
        assert torch.equal(prenorm(x, output_hidden_states=True).hidden_states[1], embedded)
        assert not torch.allclose(normed(x, output_hidden_states=True).hidden_states[1], embedded)


def test_dropout_acts_in_training_only(attention):
    model, x = small_model(attention, attention_dropout=0.5, hidden_dropout=0.5), tokens()
    assert torch.equal(model(x).logits, model(x).logits)
    model.train()
    assert not torch.allclose(model(x).logits, model(x).logits)
    torch.manual_seed(3)
    first = model(x).logits
    torch.manual_seed(3)
    assert torch.equal(first, model(x).logits)


@pytest.mark.parametrize("part", ["attention_dropout", "hidden_dropout"])
def test_each_dropout_acts(attention, part):
    model, x = small_model(attention, **{part: 0.5}).train(), tokens()
    assert not torch.allclose(model(x).logits, model(x).logits)


@pytest.mark.parametrize("training", [False, True])
def test_one_graph_under_compile(compiled_attention, training):
    torch._dynamo.reset()
    dropout_p = 0.1 if training else 0.0
    model, x = small_model(compiled_attention, num_hidden_layers=1, attention_dropout=dropout_p), tokens()
    model.train(training)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.manual_seed(0)
    result = compiled(x, labels=x, use_cache=False)
    torch.manual_seed(0)
    expected = model(x, labels=x, use_cache=False)
    torch.testing.assert_close(result.logits, expected.logits)
    result.loss.backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
def test_grouped_heads_equal_repeated_ones(attention, heads):
    """A model with fewer key heads equals one whose key heads are those, repeated."""
    grouped = small_model(attention, num_attention_heads=heads[0], num_key_value_heads=heads[1])
    full = small_model(attention, num_attention_heads=heads[0], num_key_value_heads=heads[0])
    state = grouped.state_dict()
    for name in state:
        if "k_proj" in name or "v_proj" in name:
            rows = state[name].view(heads[1], -1, state[name].shape[1])
            state[name] = rows.repeat_interleave(heads[0] // heads[1], dim=0).flatten(0, 1)
    full.load_state_dict(state)
    torch.testing.assert_close(grouped(tokens()).logits, full(tokens()).logits)


@pytest.mark.parametrize(
    "options",
    [
        {"threshold": 0.3},
        {"exclude_self": True},
        {"exclude_self": "half"},
        {"exclude_self": [False, True, True, False]},
        {"temperature": True},
        {"tolerance": 0.0},
        {"backend": "reference"},
    ],
)
def test_tra_options(options):
    model, x = small_model(attention_options=options), tokens(length=31)
    plain = small_model()
    if options == {"temperature": True}:
        assert model.model.layers[1].self_attn.temperature.eq(0).all()
        plain.load_state_dict(model.state_dict(), strict=False)
        torch.testing.assert_close(model(x).logits, plain(x).logits)
        with torch.no_grad():
            model.model.layers[0].self_attn.temperature.fill_(1.0)
        model(x, labels=x).loss.backward()
        assert model.model.layers[0].self_attn.temperature.grad.abs().sum() > 0
    else:
        plain.load_state_dict(model.state_dict())
    same = torch.allclose(model(x).logits, plain(x).logits, rtol=1e-4, atol=1e-4)
    assert same == (options in ({"tolerance": 0.0}, {"backend": "reference"}))


def test_bad_input():
    model = small_model()
    with pytest.raises(InputError, match="exactly one of input_ids and inputs_embeds"):
        model()
    with pytest.raises(InputError, match="attention_mask must be"):
        model(tokens(), attention_mask=torch.ones(2, 3))
    with pytest.raises(InputError, match="position_ids must be"):
        model(tokens(), position_ids=torch.arange(3)[None])


def test_parameter_count_of_the_medium_preset():
    config = TraformerConfig.preset("medium", vocab_size=50257)
    with torch.device("meta"):
        model = TraformerForCausalLM(config)
    block = 4 * 512**2 + 512 + 8 * 513 + 2 * 512 + (512 * 2048 + 2048) + (1024 * 512 + 512)
    assert sum(p.numel() for p in model.parameters()) == 8 * block + 2 * 50257 * 512 + 512
