"""Conversion of small random models of every family."""

from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
)

import traformer
from traformer import convert
from traformer.errors import InputError
from traformer.layers import RotaryAttention, ThresholdRelativeAttention
from traformer.methods import METHODS
from traformer.models.conversion.families import FAMILIES

VOCABULARY = 29
NO_IDS = {"bos_token_id": None, "eos_token_id": None}
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.25,
    **NO_IDS,
}  # fmt: skip
GPT2_SIZES = {
    "vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.25,
    **NO_IDS,
}  # fmt: skip


def source(family: str, **changes) -> PreTrainedModel:
    """A random model, every bias and norm included, so that one that is lost shows."""
    torch.manual_seed(0)
    model = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**{**SIZES, "attention_bias": True, **changes})),
        "mistral": lambda: MistralForCausalLM(MistralConfig(**{**SIZES, "sliding_window": None, **changes})),
        "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**{**SIZES, **changes})),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**{**SIZES, "head_dim": 16, **changes})),
        "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**{**GPT2_SIZES, **changes})),
    }[family]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def tokens(batch: int = 2, length: int = 17, seed: int = 1) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=sorted(FAMILIES))
def family(request) -> str:
    return request.param


@pytest.fixture
def converted(family):
    return convert(source(family))


def test_every_family_is_tested(family):
    assert type(source(family)) is FAMILIES[family].source


def test_the_same_attention_gives_the_same_logits(family):
    """Rotary (GPT-2: learned positions) put in the place of itself changes nothing: no weight is lost or moved."""
    model, x = source(family), tokens()
    expected = model(x).logits
    same = convert(model, "learned") if family == "gpt2" else convert(model, "rope")
    torch.testing.assert_close(same(x).logits, expected, rtol=1e-4, atol=1e-4)
    if family == "gpt2":
        kept = convert(model, "nope", keep_positions=True)
        torch.testing.assert_close(kept(x).logits, expected, rtol=1e-4, atol=1e-4)


def test_scales_of_scores_are_kept():
    model = source("gpt2", scale_attn_by_inverse_layer_idx=True)
    x = tokens()
    torch.testing.assert_close(convert(model, "learned")(x).logits, model(x).logits, rtol=1e-4, atol=1e-4)


def test_the_source_is_left_alone(family):
    model, x = source(family), tokens()
    before, expected = copy.deepcopy(model.state_dict()), model(x).logits
    changed = convert(model)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.add_(1.0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(model(x).logits, expected)


def test_without_a_copy_tensors_are_shared():
    model = source("llama")
    changed = convert(model, copy=False)
    assert changed.model.layers[1].mlp.up_proj.weight.data_ptr() == model.model.layers[1].mlp.up_proj.weight.data_ptr()
    assert changed.model.layers[1].self_attn.q_proj.weight.data_ptr() == (
        model.model.layers[1].self_attn.q_proj.weight.data_ptr()
    )


def test_tra_starts_sane(converted):
    """Every head has an open gate of its own, the same for every token; the loss is that of a model, not of noise."""
    gates = []
    for layer in converted.base_model.attention_layers:
        assert isinstance(layer, ThresholdRelativeAttention)
        assert not layer.decay_proj.weight.any()
        gates.append(torch.nn.functional.logsigmoid(layer.decay_proj.bias))
    torch.testing.assert_close(gates[0], -torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]))
    output = converted(tokens(), labels=tokens())
    assert output.logits.isfinite().all() and not any(p.is_meta for p in converted.parameters())


def test_positions_are_gone(converted):
    """A token repeated sees copies of itself only: all places give the same logits, at any length."""
    x = torch.full((1, 100), 7)
    logits = converted(x).logits
    torch.testing.assert_close(logits, logits[:, :1].expand_as(logits), rtol=1e-4, atol=1e-4)
    assert not any("rotary" in name or "wpe" in name for name, _ in converted.named_modules())


def test_it_learns(family):
    """Twenty steps on one batch, dropout and all."""
    changes = {"attn_pdrop": 0.1} if family == "gpt2" else {"attention_dropout": 0.1}
    model, x = convert(source(family, **changes)).train(), tokens(4, 24)
    assert model.base_model.attention_layers[0].dropout_p == 0.1
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(20):
        loss = model(x, labels=x).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
    assert all(layer.decay_proj.weight.any() for layer in model.base_model.attention_layers)  # the gate has learned


@pytest.mark.parametrize("attention", ["tra", "rope", "alibi"])
def test_token_by_token_equals_one_forward(family, attention):
    model, x = convert(source(family), attention), tokens(length=12)
    with torch.no_grad():
        expected = model(x).logits
        for cache in (model.base_model.new_cache(), StaticCache(config=model.config, max_cache_len=16)):
            logits = [model(x[:, :4], past_key_values=cache).logits]  # a prompt, a chunk, then single tokens
            logits.append(model(x[:, 4:9], past_key_values=cache).logits)
            logits += [model(x[:, t : t + 1], past_key_values=cache).logits for t in range(9, 12)]
            torch.testing.assert_close(torch.cat(logits, 1), expected, rtol=1e-4, atol=1e-4)


def test_generate_equals_the_argmax_of_full_forwards(converted):
    x = tokens(length=5)
    generated = converted.generate(x, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert generated.shape == (2, 11)
    with torch.no_grad():
        for t in range(5, 11):
            assert torch.equal(generated[:, t], converted(generated[:, :t]).logits[:, -1].argmax(-1))
    static = converted.generate(x, max_new_tokens=6, do_sample=False, pad_token_id=0, cache_implementation="static")
    assert torch.equal(static, generated)


def test_left_padding_changes_nothing(converted):
    x = tokens(1, 6)
    alone = converted.generate(x, max_new_tokens=5, do_sample=False, pad_token_id=0)
    padded = torch.cat((tokens(1, 4, seed=9), x), dim=1)
    mask = torch.tensor([[0] * 4 + [1] * 6])
    batch = converted.generate(
        torch.cat((padded, tokens(1, 10, seed=3))), attention_mask=torch.cat((mask, torch.ones_like(mask))),
        max_new_tokens=5, do_sample=False, pad_token_id=0,
    )  # fmt: skip
    assert torch.equal(batch[0, 4:], alone[0])
    torch.testing.assert_close(
        converted(padded, attention_mask=mask).logits[:, 4:], converted(x).logits, rtol=1e-4, atol=1e-4
    )


def test_packing_equals_separate_sequences(converted):
    a, b = tokens(1, 7), tokens(1, 5, seed=2)
    packed = converted(torch.cat((a, b), 1), cu_seqlens=torch.tensor([0, 7, 12]), use_cache=False).logits
    torch.testing.assert_close(packed[:, :7], converted(a).logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(packed[:, 7:], converted(b).logits, rtol=1e-4, atol=1e-4)


def test_save_and_load(converted, tmp_path):
    x = tokens()
    converted.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(converted)
    assert torch.equal(loaded(x).logits, converted(x).logits)
    assert loaded.config.attention == "tra" and "attention `tra`" in (tmp_path / "README.md").read_text()
    same = pickle.loads(pickle.dumps(converted))
    assert torch.equal(same(x).logits, converted(x).logits)


def test_qk_norm():
    """TRA has it as published, unless the model has its own; other methods leave scores as they were."""
    assert convert(source("llama")).config.qk_norm and not convert(source("llama"), "rope").config.qk_norm
    own = convert(source("qwen3"))
    assert not own.config.qk_norm and own.model.layers[0].self_attn.q_norm.weight.std() > 0
    assert not convert(source("gpt2"), qk_norm=False).config.qk_norm
    q, k, _ = convert(source("gpt2")).transformer.h[0].attn.project(torch.randn(1, 5, 32))
    for x in (q, k):
        torch.testing.assert_close(x.square().mean(-1), torch.ones(1, 4, 5), rtol=1e-3, atol=1e-3)


def test_options_are_saved(tmp_path):
    model = convert(source("qwen3"), qk_norm=True, threshold=0.25, exclude_self="half", temperature=True)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    layer = loaded.model.layers[0].self_attn
    assert layer.option["threshold"] == 0.25 and layer.option["exclude_self"] == "half"
    assert layer.qk_norm and layer.q_norm is None and layer.temperature.shape == (4,)
    assert torch.equal(loaded(tokens()).logits, model(tokens()).logits)


def test_a_damaged_checkpoint_is_refused(tmp_path):
    convert(source("llama")).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="not saved by a model with attention 'rope'"):
        AutoModelForCausalLM.from_pretrained(tmp_path, attention="rope", attention_options={})


@pytest.mark.parametrize(
    "attention", sorted(name for name, method in METHODS.items() if method.has_weights and not method.is_configuration)
)
def test_every_attention_of_ours(attention, tmp_path):
    for family in ("llama", "gpt2"):
        model, x = convert(source(family), attention), tokens(length=9)
        output = model(x, labels=x)
        output.loss.backward()
        assert output.logits.isfinite().all()
        assert model.generate(x, max_new_tokens=3, do_sample=False, pad_token_id=0).shape == (2, 12)
        model.save_pretrained(tmp_path / family)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / family)
        assert torch.equal(loaded(x).logits, output.logits)


def test_attention_maps_and_hidden_states(converted):
    x = tokens(length=8)
    output = converted(x, output_attentions=True, output_hidden_states=True)
    assert [tuple(w.shape) for w in output.attentions] == [(2, 4, 8, 8)] * 2
    assert len(output.hidden_states) == 3
    weights = output.attentions[0]
    assert not weights.triu(1).any()
    sums = weights.sum(-1)
    torch.testing.assert_close(sums, (sums > 0.5).float())  # a row keeps something, or nothing


def test_gradient_checkpointing(converted):
    x = tokens()
    converted.train()
    converted(x, labels=x, use_cache=False).loss.backward()
    expected = [p.grad.clone() for p in converted.parameters()] if not _drops(converted) else None
    converted.zero_grad()
    converted.gradient_checkpointing_enable({"use_reentrant": False})
    converted(x, labels=x).loss.backward()
    for index, parameter in enumerate(converted.parameters()):
        assert parameter.grad.isfinite().all()
        if expected is not None:
            torch.testing.assert_close(parameter.grad, expected[index], rtol=1e-4, atol=1e-5)


def _drops(model) -> bool:
    return any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in model.modules())


def test_bfloat16_and_tied_heads():
    model = convert(source("qwen2", tie_word_embeddings=True).to(torch.bfloat16))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model(tokens()).logits.isfinite().all()


def test_the_mean_of_learned_positions_stays():
    """A tied head adds the mean to all logits of a row alike: what the model predicts first is not touched."""
    model = source("gpt2")
    changed = convert(model)
    wte, wpe = model.transformer.wte.weight, model.transformer.wpe.weight
    torch.testing.assert_close(changed.transformer.wte.weight, wte + wpe.mean(0))
    assert changed.lm_head.weight is changed.transformer.wte.weight


def test_sliding_windows_go():
    model = source("mistral", sliding_window=4)
    changed = convert(model, "rope")
    wide = source("mistral", sliding_window=None)
    torch.testing.assert_close(changed(tokens()).logits, wide(tokens()).logits, rtol=1e-4, atol=1e-4)
    assert changed.config.sliding_window is None


def test_rope_keeps_its_base():
    model = source("qwen2", rope_parameters={"rope_type": "default", "rope_theta": 777.0})
    changed = convert(model, "rope")
    assert isinstance(changed.model.layers[0].self_attn, RotaryAttention)
    assert changed.config.attention_options == {"theta": 777.0}
    torch.testing.assert_close(changed(tokens()).logits, model(tokens()).logits, rtol=1e-4, atol=1e-4)
    scaled = source("llama", rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4})
    with pytest.raises(InputError, match="scales its rotary embedding"):
        convert(scaled, "rope")
    assert convert(scaled, "rope", theta=1e4).config.attention_options == {"theta": 1e4}


def test_kept_positions_end_where_they_ended():
    model = convert(source("gpt2"), keep_positions=True)
    with pytest.raises(InputError, match="position 64 is beyond the model's 64 learned positions"):
        model(tokens(1, 65))


def test_models_that_cannot_be_converted():
    small = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert = BertForMaskedLM(BertConfig(**small, intermediate_size=8))
    known = "Known: LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, GPT2LMHeadModel"
    with pytest.raises(InputError, match=f"BertForMaskedLM is of no family that can be converted. {known}"):
        convert(bert)
    with pytest.raises(InputError, match="T5ForConditionalGeneration is no decoder alone"):
        convert(
            T5ForConditionalGeneration(T5Config(vocab_size=9, d_model=8, d_ff=8, num_layers=1, num_heads=2, d_kv=4))
        )
    with pytest.raises(InputError, match="OPTForCausalLM is of no family"):
        convert(OPTForCausalLM(OPTConfig(**small, ffn_dim=8, word_embed_proj_dim=8)))
    with pytest.raises(InputError, match="takes a LlamaForCausalLM of this family, not LlamaModel"):
        convert(LlamaModel(LlamaConfig(**SIZES)))
    with pytest.raises(InputError, match="takes a transformers model, not Linear"):
        convert(torch.nn.Linear(2, 2))
    with pytest.raises(InputError, match="cross-attention"):
        convert(source("gpt2", add_cross_attention=True))
    with pytest.raises(InputError, match="a converted one already, with attention 'tra'"):
        convert(convert(source("llama")))


def test_named_configurations(tmp_path):
    model = convert(source("llama"), "tra_plus", tolerance=0.0)
    layer = model.model.layers[0].self_attn
    half = layer.num_heads // 2
    assert layer.decay_proj.bias.tolist() == [-6.0] * half + [6.0] * (layer.num_heads - half)
    assert layer.surrogate_width and layer.qk_norm and layer.option["tolerance"] == 0.0
    adaptive = convert(source("llama"), "tra_learned_threshold").model.layers[0].self_attn
    assert adaptive.threshold_proj.bias.eq(-2.0).all()
    assert not convert(source("llama"), "tra_no_qk_norm").config.qk_norm
    model.save_pretrained(tmp_path)
    same = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(same.eval()(tokens()).logits, model.eval()(tokens()).logits)


def test_a_trunk_from_a_converted_model_and_back(converted, tmp_path):
    x = tokens()
    expected = converted.base_model(x).last_hidden_state
    converted.save_pretrained(tmp_path / "language_model")
    trunk = AutoModel.from_pretrained(tmp_path / "language_model").eval()
    assert torch.equal(trunk(x).last_hidden_state, expected)
    trunk.save_pretrained(tmp_path / "trunk")
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "trunk", output_loading_info=True)
    assert not info["missing_keys"] - {"lm_head.weight"}
    assert torch.equal(again.eval().base_model(x).last_hidden_state, expected)


def write_gguf(path: Path, model: PreTrainedModel, quantisation: str) -> None:
    """A Llama as a GGUF file: queries and keys in its order of rotary pairs, matrices quantised as asked."""
    gguf = pytest.importorskip("gguf")
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config.vocab_size)
    inside = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    outside = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    kind = gguf.GGMLQuantizationType[quantisation]
    for name, tensor in model.state_dict().items():
        module = name.removesuffix(".weight")
        if module in outside:
            target = outside[module]
        else:
            _, _, layer, rest = module.split(".", 3)
            target = f"blk.{layer}.{inside[rest]}"
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(inside[rest])
            if heads:  # [heads, 2, half, in] as [heads, half, 2, in]
                tensor = tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        values = tensor.float().numpy()
        if values.ndim == 1:
            writer.add_tensor(f"{target}.weight", values)
        else:
            writer.add_tensor(f"{target}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("quantisation", ["F32", "Q8_0"])
def test_a_model_from_a_gguf_file(quantisation, tmp_path):
    """Its weights are floats once loaded, whatever the file holds; it converts, saves and loads as any other."""
    original = source("llama", hidden_size=64, intermediate_size=96, vocab_size=64, attention_bias=False)
    write_gguf(tmp_path / "model.gguf", original, quantisation)
    model = LlamaForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf").eval()
    assert model.hf_quantizer is not None  # what conversion must see through
    x = tokens()
    expected = model(x).logits
    torch.testing.assert_close(expected, original(x).logits, rtol=0.05, atol=0.0 if quantisation == "F32" else 0.5)
    torch.testing.assert_close(convert(model, "rope")(x).logits, expected, rtol=1e-4, atol=1e-4)
    converted = convert(model, "tra")
    converted.save_pretrained(tmp_path / "converted")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "converted")
    assert getattr(again.config, "quantization_config", None) is None
    assert torch.equal(again.eval()(x).logits, converted(x).logits)


def test_quantised_weights_are_refused():
    model = source("llama")
    model.model.layers[1].mlp.up_proj.weight = torch.nn.Parameter(
        torch.zeros(48, 32, dtype=torch.int8), requires_grad=False
    )
    with pytest.raises(InputError, match=r"weights are quantised \(model.layers.1.mlp.up_proj.weight\)"):
        convert(model)
    packed = source("llama")
    layer = packed.model.layers[0].mlp.down_proj
    del layer.weight
    layer.register_buffer("qweight", torch.zeros(4, 48, dtype=torch.int32))
    with pytest.raises(InputError, match=r"weights are quantised \(model.layers.0.mlp.down_proj.qweight\)"):
        convert(packed)


def test_bad_options():
    model = source("llama")
    with pytest.raises(InputError, match="unknown attention 'alibbi'; did you mean 'alibi'"):
        convert(model, "alibbi")
    with pytest.raises(InputError, match="'slope', unknown to attention 'tra'"):
        convert(model, slope=3)
    with pytest.raises(InputError, match="no queries and keys"):
        convert(model, "lstm")
    with pytest.raises(InputError, match="LlamaForCausalLM has none"):
        convert(model, keep_positions=True)
    with pytest.raises(InputError, match="token_type_ids"):
        convert(source("gpt2"))(tokens(), token_type_ids=tokens())


def test_it_is_where_the_documents_say():
    assert traformer.convert is convert
    assert list(inspect.signature(convert).parameters)[:2] == ["model", "attention"]


def test_families_load_when_something_is_converted(tmp_path):
    """Not before: neither `import traformer.models` nor a model of ours needs them. A saved conversion still loads."""
    convert(source("llama"), "tra").save_pretrained(tmp_path)
    code = (
        "import sys, traformer.models\n"
        "from traformer import TraformerConfig, TraformerForCausalLM\n"
        "TraformerForCausalLM(TraformerConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1))\n"
        "loaded = [name for name in sys.modules if 'modeling_llama' in name or 'conversion.families' in name]\n"
        "assert not loaded, loaded\n"
        "from transformers import AutoModelForCausalLM\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})\n"
        "assert type(model).__name__ == 'TraformerLlamaForCausalLM'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
