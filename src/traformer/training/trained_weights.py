"""Which weights of a model learn: all, those of its attention layers, or low-rank updates of its matrices (LoRA)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from traformer.models.conversion.attention import PROJECTIONS, ConvertedAttention
from traformer.runs.config import RunConfig

NEW_LR_SCALE = 10.0  # rate of what conversion added (gates), over that of weights that have learned already


class LowRankLinear(nn.Linear):
    """A Linear with a low-rank update beside its weight: y = (W + B A) x, A [rank, in], B [out, rank] starting at 0.

    Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models". W does not learn.
    """

    lora_a: nn.Parameter
    lora_b: nn.Parameter

    @classmethod
    def around(cls, linear: nn.Linear, rank: int) -> LowRankLinear:
        """The same layer, its weight and bias taken over and frozen."""
        with torch.device("meta"):
            made = cls(linear.in_features, linear.out_features, bias=linear.bias is not None)
        made.weight, made.bias = linear.weight.requires_grad_(False), linear.bias
        if linear.bias is not None:
            linear.bias.requires_grad_(False)
        made.lora_a = nn.Parameter(linear.weight.new_empty(rank, linear.in_features))
        made.lora_b = nn.Parameter(linear.weight.new_zeros(linear.out_features, rank))
        nn.init.kaiming_uniform_(made.lora_a, a=math.sqrt(5))
        return made

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.linear(F.linear(x, self.lora_a), self.lora_b)


def choose_trained(model: Any, config: RunConfig, layers: Iterable[int] | None = None) -> None:
    """Freeze what does not learn, and add low-rank updates where the config asks for them.

    layers    the attention layers that learn, where only some do
    """
    attention = model.base_model.attention_layers
    if config.objective != "answers":
        for layer in attention:
            if isinstance(layer, ConvertedAttention):
                for parameter in _added_parameters(layer):
                    vars(parameter).setdefault("lr_scale", NEW_LR_SCALE)
    if layers is None and config.train_only == "all" and config.lora is None:
        return
    chosen = attention if layers is None else [attention[index] for index in layers]
    homes: list[nn.Module] = list(model.base_model.blocks) if layers is None and config.train_only == "all" else chosen
    model.requires_grad_(False)
    if config.lora is None:
        for home in homes:
            home.requires_grad_(True)
        return
    torch.manual_seed(config.seed)
    for layer in chosen:
        for parameter in _added_parameters(layer):
            parameter.requires_grad_(True)
    of_gates = {id(module) for layer in attention for module in _added_modules(layer)}
    for home in homes:
        for parent in list(home.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Linear and id(child) not in of_gates:
                    setattr(parent, name, LowRankLinear.around(child, config.lora))


def _added_modules(layer: Any) -> list[nn.Module]:
    """Modules of an attention layer that are no projection: its gate and whatever else its method has."""
    return [module for name, module in layer.named_children() if name not in (*PROJECTIONS, "q_norm", "k_norm")]


def _added_parameters(layer: Any) -> list[nn.Parameter]:
    own = list(layer.parameters(recurse=False))
    return own + [parameter for module in _added_modules(layer) for parameter in module.parameters()]


def merged(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict with its low-rank updates added to the weights they belong to."""
    whole = {name: tensor for name, tensor in weights.items() if not name.endswith((".lora_a", ".lora_b"))}
    for name in weights:
        if name.endswith(".lora_a"):
            home = name.removesuffix(".lora_a")
            update = weights[f"{home}.lora_b"].float() @ weights[name].float()
            weight = whole[f"{home}.weight"]
            whole[f"{home}.weight"] = (weight.float() + update).to(weight.dtype)
    return whole
