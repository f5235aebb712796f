"""The catalogue of methods: torch-free, right for options and configurations, and the only place that knows names."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from traformer.errors import InputError
from traformer.layers import AttentionContext, AttentionLayer, layer_class
from traformer.methods import EAGER, METHODS, OPERATOR, Method, label_of, resolve_method
from traformer.models import TraformerConfig, TraformerForCausalLM


def in_a_fresh_process(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_names_need_no_torch():
    """The catalogue, `tra list` and the refusal of a mistyped name load neither torch nor transformers."""
    code = (
        "import sys\n"
        "import traformer.methods\n"
        "from traformer.cli import main\n"
        "main(['list', 'attentions'])\n"
        "assert main(['train', '--attention', 'rop']) == 2\n"
        "assert main(['train', '--attention', 'rope', '--attention-option', 'thta=3']) == 2\n"
        "assert main(['bench', 'train', '--attentions', 'rop']) == 2\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    assert in_a_fresh_process(code).split() == list(METHODS)


def test_unknown_names_and_options_are_one_sentence():
    with pytest.raises(InputError, match="unknown attention 'tra_pls'; did you mean 'tra_plus'"):
        resolve_method("tra_pls")
    with pytest.raises(InputError, match="'thta', unknown to attention 'rope'; its options: theta"):
        resolve_method("rope", {"thta": 1.0})


def test_every_entry_is_complete():
    for name, method in METHODS.items():
        assert method.name == name and len(method.summary) > 15 and method.label
        assert METHODS[method.attention].layer == method.layer
        layer = layer_class(name)
        assert issubclass(layer, AttentionLayer) and layer.name == method.attention
        assert all(option.help for option in method.option_table.values())


def test_abilities_are_those_of_the_options():
    assert resolve_method("tra_plus").path == OPERATOR and resolve_method("tra_plus").gate == "decay_proj"
    distance_only = resolve_method("tra_distance_only")
    assert distance_only.path == EAGER and distance_only.writes_square and distance_only.reads_all_keys
    assert resolve_method("tra_plus", {"removal": False, "straight_through": False}).writes_square
    assert not resolve_method("tra_fixed_decay").has_gates and resolve_method("tra_forget_distance").has_gates
    assert resolve_method("ssmax").keys_carry_position
    assert not resolve_method("ssmax", {"position": "none"}).keys_carry_position
    assert resolve_method("fot").gate == "forget_proj" and resolve_method("lstm").recurrent
    assert label_of("rope") == "RoPE" and label_of("a method of tomorrow") == "a method of tomorrow"


def small(name: str, **overrides) -> TraformerForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 19, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
    return TraformerForCausalLM(TraformerConfig(attention=name, **sizes, **overrides)).eval()


@pytest.mark.parametrize("name", list(METHODS))
def test_gates_are_where_the_catalogue_says(name):
    method, layer = METHODS[name], small(name).model.layers[0].self_attn
    found = [gate for gate in ("decay_proj", "forget_proj") if getattr(layer, gate, None) is not None]
    assert found == ([method.gate] if method.gate else [])


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.has_weights])
@torch.no_grad()
def test_keys_carry_position_where_the_catalogue_says(name):
    """The key that the first layer caches is the same wherever its token is, or it is not."""
    model, ids = small(name), torch.tensor([[5, 7, 7, 9]])
    cache = model.model.new_cache()
    model(ids, past_key_values=cache)
    keys = cache.layers[0].keys[0]
    differs = (keys[:, 1] - keys[:, 2]).abs().max() > 1e-5
    assert bool(differs) == METHODS[name].keys_carry_position


class MeanAttention(AttentionLayer):
    """A toy method for the test below: the mean of all values so far."""

    name = "mean"

    def attend(self, q, k, v, hidden_states, context: AttentionContext):
        visible = context.visible(q.shape[2], q.device).to(v.dtype)  # [B or 1, 1, T, Tk]
        weights = (visible / visible.sum(-1, keepdim=True)).expand(v.shape[0], self.num_heads, -1, -1)
        v = v.repeat_interleave(self.num_heads // self.num_key_heads, dim=1)
        return weights @ v, weights if context.output_attentions else None


def test_a_new_method_is_one_layer_and_one_entry(monkeypatch, tmp_path, capsys):
    """With its entry alone a method trains, decodes, is saved, listed, converted to, estimated and labelled."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from traformer import convert
    from traformer.cli import main
    from traformer.models.memory import memory_need

    entry = Method("mean", f"{__name__}:MeanAttention", "Mean", "The mean of all values so far.", path=EAGER)
    monkeypatch.setitem(METHODS, "mean", entry)
    model, ids = small("mean"), torch.randint(1, 19, (2, 9))
    model(ids, labels=ids).loss.backward()
    with torch.no_grad():
        full = model(ids, use_cache=False).logits
        cache = model.model.new_cache()
        steps = [model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(9)]
        torch.testing.assert_close(torch.cat(steps, 1), full)
        model.save_pretrained(tmp_path)
        assert torch.equal(TraformerForCausalLM.from_pretrained(tmp_path)(ids).logits, full)
        llama = LlamaForCausalLM(
            LlamaConfig(vocab_size=19, hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
        )
        assert convert(llama, "mean")(ids).logits.isfinite().all()
    assert memory_need(model.config, 9, training=True).fixed > 0
    assert main(["list", "attentions"]) == 0 and "mean" in capsys.readouterr().out.split()
    assert label_of("mean") == "Mean"
