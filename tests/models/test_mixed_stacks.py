"""Stacks that mix methods: each layer is what it would be alone, and everything that a model does works on them."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tests.models.common import check_decoding, small_model
from tests.training.tiny import tiny_config
from traformer import convert
from traformer.cli import main
from traformer.errors import InputError
from traformer.methods import label_of, resolve_stack, stack_of
from traformer.models import TraformerForCausalLM
from traformer.models.memory import memory_need
from traformer.training.loop import train

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
MIXTURES = {
    "rope and tra_plus": {"attention": ["rope", "tra_plus"]},
    "four methods": {"attention": ["rope", "tra", "t5", "fot"]},
    "two tables": {"attention": ["learned", "t5", "learned", "t5"]},
    "eager and recurrent": {"attention": "cope,lstm,selective,tra_distance_only"},
    "options by layer": {
        "attention": "rope",
        "attention_options": [{"theta": 100.0}, {"sliding_window": 3}, {}, {"theta": 100.0}],
    },
    "options by name": {"attention": ["rope_equal", "tra"], "attention_options": {"tra": {"threshold": 0.2}}},
    "norms by layer": {"attention": ["tra_no_qk_norm", "tra"]},
}


SIZES = {"vocab_size": 19, "hidden_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}


def small(mixture: str, **more) -> TraformerForCausalLM:
    return small_model(**MIXTURES[mixture], num_hidden_layers=4, **SIZES, **more)


def tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(1, 19, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("mixture", MIXTURES)
@torch.no_grad()
def test_decoding_padding_and_packing(mixture):
    model, x = small(mixture), tokens(2, 12)
    check_decoding(model, x, **CLOSE)
    packed = model(x.view(1, -1), cu_seqlens=torch.tensor([0, 12, 24]), use_cache=False).logits[0]
    separate = model(x, use_cache=False).logits
    torch.testing.assert_close(packed.view_as(separate), separate, **CLOSE)


@pytest.mark.parametrize("mixture", MIXTURES)
def test_saved_and_loaded(mixture, tmp_path):
    model, x = small(mixture), tokens(2, 9)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert [x.all_options for x in stack_of(loaded.config)] == [x.all_options for x in stack_of(model.config)]
    with torch.no_grad():
        assert torch.equal(loaded(x).logits, model(x).logits)
    assert ", ".join(dict.fromkeys(x.attention for x in stack_of(model.config))) in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize("mixture", MIXTURES)
def test_generate_and_gradient_checkpointing(mixture):
    model, x = small(mixture), tokens(1, 5)
    generated = model.generate(x, max_new_tokens=6, do_sample=False)
    for t in range(5, 11):
        with torch.no_grad():
            assert generated[0, t] == model(generated[:, :t], use_cache=False).logits[0, -1].argmax()
    grads = []
    for checkpointing in (False, True):
        model = small(mixture).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        y = tokens(2, 9)
        model(y, labels=y, use_cache=False).loss.backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
        assert all(grad is not None for grad in grads[-1].values())
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, msg=name)


def test_what_prepare_makes_is_shared_by_layers_of_one_kind():
    model = small("two tables")
    layers = model.model.attention_layers
    assert model.model.leaders == [0, 1] and [layer.leader for layer in layers] == [0, 1, 0, 1]
    assert layers[1].bias_table is not None and layers[3].bias_table is None
    assert hasattr(layers[0], "position_table") and not hasattr(layers[2], "position_table")
    assert small("options by layer").model.leaders == [0, 1, 2]  # the fourth is as the first


def test_a_layer_of_a_mixture_is_what_it_is_in_a_uniform_stack():
    """The first layers of rope, rope and of rope, tra give the same; the second ones do not."""
    first, second = (small_of(attention) for attention in (["rope", "rope"], ["rope", "nope"]))
    second.load_state_dict(first.state_dict())
    x = tokens(2, 9)
    a, b = (model(x, output_hidden_states=True, use_cache=False).hidden_states for model in (first, second))
    assert torch.equal(a[1], b[1]) and not torch.equal(a[2], b[2])


def small_of(attention, layers: int = 2, **more) -> TraformerForCausalLM:
    return small_model(attention, num_hidden_layers=layers, **SIZES, **more)


def test_how_a_mixture_is_written():
    config = small_of("rope, tra_plus", layers=4).config
    assert config.attention == ["rope", "tra_variant"] * 2 and config.attention_options[1]["straight_through"]
    assert small_of(["tra", "tra"]).config.attention == "tra"  # one method after all
    assert small_of(["tra", "tra_no_qk_norm"]).config.qk_norm == [True, False]
    assert label_of("rope,tra_plus") == "RoPE + tra_plus"
    assert [method.name for method in resolve_stack(["rope", "tra"], None, 4)] == ["rope", "tra", "rope", "tra"]
    for attention, options, sentence in (
        (["rope", "tra", "tra"], {}, "attention has 3 names for 4 layers"),
        (["rope", "tra_pls"], {}, "did you mean 'tra_plus'"),
        ([], {}, "attention is an empty list"),
        (["rope", "tra"], {"theta": 3.0}, "maps their names \\(rope, tra\\) to their options"),
        (["rope", "tra"], [{}], "attention_options has 1 entries and attention 2"),
        (["rope", "tra"], {"tra": {"theta": 3.0}}, "'theta', unknown to attention 'tra'"),
    ):
        with pytest.raises(InputError, match=sentence):
            small_of(attention, layers=4, attention_options=options)


def test_caches_of_mixtures_are_cut_where_no_key_carries_position():
    model, x = small_of(["nope", "tra"]), tokens(1, 8)
    with torch.no_grad():
        cache = model.model.new_cache()
        model(x, past_key_values=cache)
        assert cache.cut(2, 5).get_seq_length() == 3
        model = small_of(["tra", "rope"])
        cache = model.model.new_cache()
        model(x, past_key_values=cache)
    with pytest.raises(InputError, match="carry their position"):
        cache.cut(2)


def test_memory_counts_the_layers_that_write_a_square():
    sizes = {"length": 2048, "training": False}
    plain, one, all_of_them = (
        memory_need(small_of(attention).config, **sizes).per_sequence
        for attention in (["tra", "tra"], ["tra", "cope"], ["cope", "cope"])
    )
    assert plain < one <= all_of_them


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_conversion(kind, tmp_path):
    torch.manual_seed(0)
    if kind == "llama":
        source = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=19, hidden_size=24, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2,
                num_key_value_heads=1, bos_token_id=None, eos_token_id=None,
            )
        )  # fmt: skip
    else:
        source = GPT2LMHeadModel(
            GPT2Config(vocab_size=19, n_embd=24, n_layer=4, n_head=2, n_positions=64, bos_token_id=1, eos_token_id=2)
        )
    source, x = source.eval(), tokens(2, 9)
    attention = ["rope", "tra_plus"] if kind == "llama" else ["learned", "tra_plus"]
    model = convert(source, attention, tra_plus={"threshold": 0.1})
    stack = stack_of(model.config)
    assert [method.attention for method in stack] == [attention[0], "tra_variant"] * 2
    assert stack[1].options["threshold"] == 0.1 and [method.qk_norm for method in stack] == [False, True] * 2
    with torch.no_grad():
        full = model(x, use_cache=False).logits
        cache = model.base_model.new_cache()
        steps = [model(x[:, t : t + 1], past_key_values=cache).logits for t in range(9)]
        torch.testing.assert_close(torch.cat(steps, 1), full, **CLOSE)
        model.save_pretrained(tmp_path)
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(x, use_cache=False).logits, full)
        # A source's own attention in every layer, written as a list, changes nothing.
        own = convert(source, [attention[0]] * 4)
        torch.testing.assert_close(own(x).logits, source(x).logits, **CLOSE)


def test_every_command_takes_a_run_that_mixes_methods(tmp_path, capsys):
    config = tiny_config(attention=["rope", "tra_plus"], attention_options={"rope": {"theta": 100.0}}, steps=2)
    config = config.replace(model_options={**config.model_options, "num_hidden_layers": 2})
    assert config.attention == "rope,tra_plus"
    run = tmp_path / "mixed"
    train(config, run, quiet=True)
    for command in (
        ["eval", str(run), "--lengths", "12,24", "--examples", "4"],
        ["diagnose", str(run), "--lengths", "12", "--examples", "2", "--out", str(tmp_path / "d")],
        ["stretch", str(run), "--lengths", "32", "--examples", "2", "--out", str(tmp_path / "s")],
        ["report", str(run), "--out", str(tmp_path / "r")],
    ):
        assert main(command) == 0, capsys.readouterr().err
    assert "RoPE + tra_plus" in (tmp_path / "r" / "report.html").read_text()
    flags = ["--task", "flip_flop", "--length", "12", "--preset", "tiny", "--steps", "1", "--threads", "1"]
    assert main(["train", *flags, "--attention", "rope,tra_plus", "--out", str(tmp_path / "by_flag")]) == 0
    capsys.readouterr()
    assert main(["train", *flags, "--attention", "rope,tra_pls", "--out", str(tmp_path / "no")]) == 2
    assert "did you mean 'tra_plus'" in capsys.readouterr().err and not (tmp_path / "no").exists()
