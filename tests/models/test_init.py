"""The start of training is the authors', whatever transformers does on the way."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from traformer.models import TraformerConfig, TraformerForCausalLM


def build(how: str) -> TraformerForCausalLM:
    config = TraformerConfig(vocab_size=500, hidden_size=128, num_hidden_layers=2, num_attention_heads=2)
    torch.manual_seed(0)
    return TraformerForCausalLM(config) if how == "class" else AutoModelForCausalLM.from_config(config)


def is_uniform(x: torch.Tensor, bound: float) -> bool:
    """All within the bound, reaching near it, and with a uniform distribution's spread."""
    spread = x.std().item() / (bound / math.sqrt(3))
    tolerance = 5 / math.sqrt(x.numel())
    return x.abs().max() <= bound and x.abs().max() > bound * (1 - 20 / x.numel()) and abs(spread - 1) < tolerance


@pytest.mark.parametrize("how", ["class", "from_config"])
def test_statistics(how):
    model = build(how)
    embedding = model.get_input_embeddings()
    assert embedding.padding_idx == 0 and embedding.weight[0].eq(0).all()
    assert is_uniform(embedding.weight[1:], 0.01)
    head = model.lm_head.weight
    assert abs(head.std().item() / 0.02 - 1) < 0.02 and abs(head.mean().item()) < 5e-4
    assert head.abs().max() > 0.06  # a normal's tails: no uniform of this spread reaches them
    linears = [(name, x) for name, x in model.model.named_modules() if isinstance(x, nn.Linear)]
    assert len(linears) == 2 * 7
    for name, linear in linears:
        bound = 1 / math.sqrt(linear.in_features)
        assert is_uniform(linear.weight, bound), name
        if linear.bias is not None:
            assert linear.bias.abs().max() <= bound and linear.bias.std() > bound / 4, name
    with_bias = {name.rsplit(".", 1)[1] for name, x in linears if x.bias is not None}
    assert with_bias == {"decay_proj", "o_proj", "in_proj", "out_proj"}
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert parameter.eq(1).all(), name


def test_the_seed_decides_the_start():
    first, second = build("class"), build("class")
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_loading_initialises_only_what_is_missing(tmp_path):
    model = build("class")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    state = {name: x for name, x in model.state_dict().items() if "decay_proj" not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    loaded = TraformerForCausalLM.from_pretrained(tmp_path, strict=False)
    for name, parameter in loaded.named_parameters():
        if "decay_proj" in name:
            assert parameter.abs().max() <= 1 / math.sqrt(128) and parameter.std() > 0, name
        else:
            assert parameter.eq(7.0).all(), name
