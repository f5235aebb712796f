"""FIRE: functional interpolation for relative positions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from traformer.errors import InputError
from traformer.layers.base import AttentionContext
from traformer.layers.softmax import SoftmaxAttentionLayer
from traformer.ops.fire import fire_inputs


class FireAttention(SoftmaxAttentionLayer):
    """Softmax attention with a learned function of relative distance that interpolates between lengths: FIRE.

    Source: Li et al. 2024, "Functional Interpolation for Relative Positions": bias_h(i, j) = f_h(log(c(i-j)+1) /
    log(c max(i, L)+1)), f an MLP with one hidden layer of 32 (ReLU) and an output for each head; c starts at 0.1 and
    L at init_length, both learned; positions count from 0. One function a layer (the paper's default, not the variant
    that shares one). torch's default init for the MLP, whose last Linear has no bias: the softmax would take it away.
    Path: torch's attention with the bias as a float mask.

    Options: hidden, width of the MLP; init_length, where L starts (512 in the paper's appendix).
    """

    name = "fire"

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.bias_in = nn.Linear(1, self.option["hidden"])
        self.bias_out = nn.Linear(self.option["hidden"], self.num_heads, bias=False)
        self.slope = nn.Parameter(torch.tensor(0.1))
        self.length_factor = nn.Parameter(torch.tensor(1.0))  # L = length_factor * init_length

    @classmethod
    def check_options(cls, config: Any, options: dict[str, Any]) -> None:
        super().check_options(config, options)
        if not isinstance(options["hidden"], int) or options["hidden"] < 1:
            raise InputError(f"attention option hidden must be a whole number above zero, got {options['hidden']!r}")
        if not options["init_length"] > 0:
            raise InputError(f"attention option init_length must be positive, got {options['init_length']!r}")

    def reset_own_parameters(self) -> None:
        from transformers import initialization as init

        super().reset_own_parameters()
        init.constant_(self.slope, 0.1)
        init.constant_(self.length_factor, 1.0)

    def prepare(self, context: AttentionContext, hidden_states: Tensor) -> Any:
        length, device = hidden_states.shape[1], hidden_states.device
        where = context.distances(length, device), context.positions(length, device)
        return super().prepare(context, hidden_states), where

    def mask(self, context: AttentionContext) -> Tensor | None:
        return context.shared[0]

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, hidden_states: Tensor, context: AttentionContext
    ) -> tuple[Tensor, Tensor | None]:
        distance, position = context.shared[1]
        threshold = self.length_factor * self.option["init_length"]
        inputs = fire_inputs(distance, position, self.slope, threshold)  # [B or 1, T, Tk]
        bias = self.bias_out(F.relu(self.bias_in(inputs.unsqueeze(-1)))).permute(0, 3, 1, 2)
        return self.softmax_attention(q, k, v, context, self.scale, bias)
