"""Small random models for the tests of this folder."""

from __future__ import annotations

from typing import Any

import torch

from traformer.models import TraformerConfig, TraformerForCausalLM

SMALL = {
    "vocab_size": 23,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def small_model(attention: str = "tra", seed: int = 0, **overrides: Any) -> TraformerForCausalLM:
    """A random model whose outputs are far from uniform, in eval mode."""
    torch.manual_seed(seed)
    model = TraformerForCausalLM(TraformerConfig(attention=attention, **{**SMALL, **overrides})).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(50.0)
    return model


def tokens(batch: int = 2, length: int = 17, seed: int = 1) -> torch.Tensor:
    """Random token ids [batch, length] without the padding id."""
    return torch.randint(1, SMALL["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed))
