"""Weights of the authors' published module, under our names."""

from __future__ import annotations

import re

from torch import Tensor

from traformer.errors import InputError

_TOP = {
    "embedding.weight": "model.embed_tokens.weight",
    "outln.weight": "model.norm.weight",
    "out.weight": "lm_head.weight",
}
_LAYER = {
    "ln1.weight": "attention_norm.weight",
    "ln2.weight": "mlp_norm.weight",
    "attn.toqueries.weight": "self_attn.q_proj.weight",
    "attn.tokeys.weight": "self_attn.k_proj.weight",
    "attn.tovalues.weight": "self_attn.v_proj.weight",
    "attn.delta_proj.weight": "self_attn.decay_proj.weight",
    "attn.delta_proj.bias": "self_attn.decay_proj.bias",
    "attn.c_out.weight": "self_attn.o_proj.weight",
    "attn.c_out.bias": "self_attn.o_proj.bias",
    "mlp.linear1.weight": "mlp.in_proj.weight",
    "mlp.linear1.bias": "mlp.in_proj.bias",
    "mlp.linear2.weight": "mlp.out_proj.weight",
    "mlp.linear2.bias": "mlp.out_proj.bias",
}
_IGNORED = {"attn.bias"}  # their causal mask


def convert_authors_state_dict(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Their state dict as one that TraformerForCausalLM with attention "tra" loads; tensors are shared, not copied."""
    converted: dict[str, Tensor] = {}
    for name, tensor in state_dict.items():
        layer = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
        if layer and layer[2] in _IGNORED:
            continue
        if layer and layer[2] in _LAYER:
            converted[f"model.layers.{layer[1]}.{_LAYER[layer[2]]}"] = tensor
        elif name in _TOP:
            converted[_TOP[name]] = tensor
        else:
            raise InputError(f"the state dict holds {name!r}, which the authors' module does not have; is it theirs?")
    missing = sorted(set(_TOP) - set(state_dict))
    if missing:
        raise InputError(f"the state dict lacks {missing[0]!r}; is it the authors' module's?")
    return converted
