"""Small random models for the tests of models and layers, and a check that several of them make."""

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


def small_model(attention: str | list[str] = "tra", seed: int = 0, **overrides: Any) -> TraformerForCausalLM:
    """A random model whose outputs are far from uniform, in eval mode."""
    torch.manual_seed(seed)
    model = TraformerForCausalLM(TraformerConfig(attention=attention, **{**SMALL, **overrides})).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(50.0)
    return model


def tokens(batch: int = 2, length: int = 17, seed: int = 1) -> torch.Tensor:
    """Random token ids [batch, length] without the padding id."""
    return torch.randint(1, SMALL["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def check_decoding(model: TraformerForCausalLM, x: torch.Tensor, **close: float) -> None:
    """A chunk of x [2, 12], then token by token, equals one forward; the second row has padding on the left."""
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, :4] = 0
    full = model(x, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(full[1, 4:], model(x[1:, 4:], use_cache=False).logits[0], **close)
    cache = model.model.new_cache()
    pieces = [model(x[:, :7], attention_mask=mask[:, :7], past_key_values=cache).logits]
    for t in range(7, 12):
        pieces.append(model(x[:, t : t + 1], attention_mask=mask[:, : t + 1], past_key_values=cache).logits)
    decoded = torch.cat(pieces, 1)
    torch.testing.assert_close(decoded[0], full[0], **close)
    torch.testing.assert_close(decoded[1, 4:], full[1, 4:], **close)
