"""What people do with a Hugging Face model: look inside, save memory, tune, compile, export, share."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, StaticCache
from transformers.integrations.executorch import TorchExportableModuleWithStaticCache
from transformers.utils import logging as transformers_logging

from tests.models.common import SMALL, small_model, tokens
from traformer.errors import InputError
from traformer.methods import METHODS
from traformer.models import TraformerConfig, TraformerForCausalLM, TraformerModel


def test_auto_classes():
    config = AutoConfig.for_model("traformer", **SMALL)
    assert type(config) is TraformerConfig
    assert type(AutoModel.from_config(config)) is TraformerModel
    assert type(AutoModelForCausalLM.from_config(config)) is TraformerForCausalLM


def test_attention_maps_agree_with_the_fused_path(attention):
    """The maps, applied to the values, give what the layer gave: caught at the input of the output projection."""
    if not METHODS[attention].has_weights:
        pytest.skip("the method weighs no keys")
    if attention == "differential":
        pytest.skip("the method norms each head after it has mixed the values")
    model, x = small_model(attention), tokens(batch=2, length=19)
    mask = torch.ones(2, 19, dtype=torch.long)
    mask[1, :6] = 0
    caught: dict[tuple[int, str], torch.Tensor] = {}
    for index, block in enumerate(model.model.layers):
        layer = block.self_attn
        layer.v_proj.register_forward_hook(lambda m, a, out, i=index: caught.__setitem__((i, "v"), out))
        layer.o_proj.register_forward_hook(lambda m, a, out, i=index: caught.__setitem__((i, "mixed"), a[0]))
    with torch.no_grad():
        maps = model(x, attention_mask=mask, output_attentions=True).attentions
    assert len(maps) == 2
    for index, weights in enumerate(maps):
        assert weights.shape == (2, 4, 19, 19)
        assert weights.triu(1).eq(0).all() and weights[1, :, :, :6].eq(0).all()
        values = caught[index, "v"].view(2, 19, 2, 8).transpose(1, 2).repeat_interleave(2, dim=1)
        mixed = (weights @ values).transpose(1, 2).reshape(2, 19, 32)
        real = mask.bool()
        torch.testing.assert_close(mixed[real], caught[index, "mixed"][real], rtol=1e-4, atol=1e-5)


def test_attention_maps_while_decoding(attention):
    if not METHODS[attention].has_weights:
        pytest.skip("the method weighs no keys")
    model, x = small_model(attention), tokens(length=9)
    with torch.no_grad():
        full = model(x, output_attentions=True).attentions
        cache = model.model.new_cache()
        model(x[:, :6], past_key_values=cache)
        step = model(x[:, 6:], past_key_values=cache, output_attentions=True).attentions
    for a, b in zip(full, step, strict=True):
        torch.testing.assert_close(a[:, :, 6:], b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(attention, reentrant):
    x, grads = tokens(), []
    for checkpointing in (False, True):
        model = small_model(attention, attention_dropout=0.2, hidden_dropout=0.2).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            if reentrant:
                model.enable_input_require_grads()
        torch.manual_seed(7)
        model(x, labels=x, use_cache=checkpointing).loss.backward()
        grads.append([p.grad for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_bf16_autocast(attention):
    """Under autocast the result is that of fp32 to bf16's precision, forward and backward."""
    model, x = small_model(attention), tokens(length=24)
    model(x, labels=x, use_cache=False).loss.backward()
    exact = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        output = model(x, labels=x, use_cache=False)
    output.loss.backward()
    reference = model(x, labels=x, use_cache=False).loss
    assert abs(output.loss.item() / reference.item() - 1) < 0.1
    for name, parameter in model.named_parameters():
        assert parameter.grad.dtype == torch.float32 and parameter.grad.isfinite().all(), name
    cosine = torch.cosine_similarity(
        torch.cat([p.grad.flatten() for p in model.parameters()]),
        torch.cat([g.flatten() for g in exact.values()]),
        dim=0,
    )
    assert cosine > 0.9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_generate(attention, dtype):
    """Each generated token is the best by the step's logits, which are as right as one forward of that precision."""
    model, x = small_model(attention).to(dtype), tokens(length=7)
    result = model.generate(x, max_new_tokens=6, do_sample=False, return_dict_in_generate=True, output_logits=True)
    steps = torch.stack(result.logits, dim=1)  # [B, 6, vocabulary]
    assert torch.equal(steps.argmax(-1), result.sequences[:, 7:])
    with torch.no_grad():
        forward = model(result.sequences[:, :-1]).logits[:, 6:].double()
        exact = model.to(torch.float64)(result.sequences[:, :-1]).logits[:, 6:]  # the same rounded weights
    error, allowed = (steps.double() - exact).abs().max(), (forward - exact).abs().max()
    rounding = 2**-23 * exact.abs().max()  # generate hands logits out in float32
    assert error <= 2 * allowed + rounding, f"{error} by steps, {allowed} by one forward"


def test_lora(attention, tmp_path):
    peft = pytest.importorskip("peft")
    base = small_model(attention)
    x = tokens()
    before = base(x).logits.detach()
    layer = base.model.layers[0].self_attn
    targets = [name for name, module in layer.named_children() if isinstance(module, torch.nn.Linear)]
    assert {"q_proj", "k_proj", "v_proj", "o_proj"} <= set(targets) or not METHODS[attention].has_weights
    config = peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", init_lora_weights=False)
    torch.manual_seed(0)
    model = peft.get_peft_model(copy.deepcopy(base), config)
    trainable = [n for n, p in model.named_parameters() if p.requires_grad]
    assert len(trainable) == 2 * len(targets) * 2 and all("lora" in n for n in trainable)
    model.train()
    model(input_ids=x, labels=x).loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters() if p.requires_grad)
    model.eval()
    tuned = model(input_ids=x).logits.detach()
    assert not torch.allclose(tuned, before)
    assert model.generate(input_ids=x, max_new_tokens=3, do_sample=False).shape == (2, 20)
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).eval()
    torch.testing.assert_close(loaded(input_ids=x).logits, tuned)
    torch.testing.assert_close(model.merge_and_unload()(x).logits, tuned, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("padded", [False, True])
def test_decode_step_is_one_graph(compiled_attention, padded):
    """One token onto a static cache, compiled whole: the graph serves every step and gives what one forward gives."""
    torch._dynamo.reset()
    model, x = small_model(compiled_attention), tokens(length=12)
    mask = None
    if padded:
        mask = torch.ones(2, 16, dtype=torch.long)
        mask[1, :3] = 0
    cache = StaticCache(config=model.config, max_cache_len=16)
    step = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        expected = model(x, attention_mask=None if mask is None else mask[:, :12]).logits
        # generate hands over masks at the cache's full length
        full = mask
        model(x[:, :8], attention_mask=full, past_key_values=cache)
        for t in range(8, 12):
            logits = step(x[:, t : t + 1], attention_mask=full, past_key_values=cache).logits
            torch.testing.assert_close(logits[:, 0], expected[:, t], rtol=1e-4, atol=1e-4)


def test_export_of_the_decode_step(compiled_attention, request):
    """transformers' own recipe: one token onto a static cache that the program holds."""
    if not METHODS[compiled_attention].has_weights:
        reason = "the recipe makes its cache before the first token, at the size of an attention layer's keys"
        request.applymarker(pytest.mark.xfail(strict=True, reason=reason))
    model, x = small_model(compiled_attention), tokens(1, 9)
    model.generation_config.cache_implementation = "static"
    with torch.no_grad():
        expected = model(x).logits
        module = TorchExportableModuleWithStaticCache(model, batch_size=1, max_cache_len=16)
        example = {"input_ids": x[:, :1], "cache_position": torch.tensor([0])}
        cache = model.model.new_cache()
        model(x, past_key_values=cache)
        if cache.layers[0].keys.shape[-1] != model.config.head_dim:
            # The recipe makes its cache before the first token, with no room for what these keys carry beside k.
            with pytest.raises(InputError, match="cannot be exported"):
                torch.export.export(module, (), example)
            return
        step = torch.export.export(module, (), example).module()
        for t in range(9):
            logits = step(input_ids=x[:, t : t + 1], cache_position=torch.tensor([t]))
            torch.testing.assert_close(logits[:, 0], expected[:, t], rtol=1e-4, atol=1e-4)


def test_no_attentions_where_no_keys_are_weighed(attention):
    output = small_model(attention)(tokens(), output_attentions=True)
    assert (output.attentions is None) == (not METHODS[attention].has_weights)


def test_a_loss_on_attentions_has_a_gradient():
    """And the loss of the output has none with respect to them: they are not on its path."""
    model, x = small_model(), tokens()
    output = model(x, labels=x, output_attentions=True)
    output.attentions[0].retain_grad()
    output.loss.backward(retain_graph=True)
    assert output.attentions[0].grad is None
    model.zero_grad()
    output.attentions[0].square().sum().backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0


def test_the_warning_about_attentions_comes_once(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    transformers_logging.warning_once.cache_clear()
    model, x = small_model(), tokens()
    with caplog.at_level(logging.WARNING):
        with torch.no_grad():
            model(x, output_attentions=True)
        assert not caplog.records
        model(x, output_attentions=True)
        model(x, output_attentions=True)
    assert len([record for record in caplog.records if "beside the output" in record.message]) == 1


def test_a_base_model_from_a_language_model_and_back(attention, tmp_path):
    """transformers strips or adds the prefix and warns of a head that is new; everything else must be there."""
    model, x = small_model(attention), tokens()
    model.save_pretrained(tmp_path / "language_model")
    base = TraformerModel.from_pretrained(tmp_path / "language_model").eval()
    with torch.no_grad():
        expected = model.model(x).last_hidden_state
        assert torch.equal(base(x).last_hidden_state, expected)
    base.save_pretrained(tmp_path / "base")
    again, info = TraformerForCausalLM.from_pretrained(tmp_path / "base", output_loading_info=True)
    assert info["missing_keys"] == {"lm_head.weight"}
    with torch.no_grad():
        assert torch.equal(again.eval().model(x).last_hidden_state, expected)
    assert 0.015 < again.lm_head.weight.std() < 0.025  # as a head starts


def test_a_base_model_of_another_attention_is_refused(tmp_path):
    small_model("tra").save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"holds .*decay_proj"):
        TraformerModel.from_pretrained(tmp_path, attention="rope")


def test_model_card(tmp_path):
    model = small_model("tra", attention_options={"threshold": 0.5})
    model.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert "attention `tra`" in card and "threshold = 0.5" in card and f"{model.num_parameters():,} parameters" in card
    (tmp_path / "README.md").write_text("mine")
    model.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"


def test_a_checkpoint_of_another_attention_is_refused(tmp_path):
    small_model("tra").save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"holds .*decay_proj.* not saved by a model with attention 'rope'"):
        TraformerForCausalLM.from_pretrained(tmp_path, attention="rope")
    small_model("rope").save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"lacks .*decay_proj"):
        AutoModelForCausalLM.from_pretrained(tmp_path, attention="tra")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attention="tra", strict=False)
    assert loaded.config.attention == "tra"


def test_a_checkpoint_of_a_newer_version_is_refused(tmp_path):
    model = small_model("tra")
    model.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"format_version": 1', '"format_version": 2'))
    with pytest.raises(InputError, match=r"saved in format 2.*upgrade traformer"):
        TraformerForCausalLM.from_pretrained(tmp_path)
