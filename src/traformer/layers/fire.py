"""FIRE: functional interpolation for relative positions."""

from __future__ import annotations

from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from traformer.errors import InputError
from traformer.layers.context import AttentionContext
from traformer.layers.options import SoftmaxArguments
from traformer.layers.softmax import SoftmaxAttentionLayer
from traformer.types import Options

_TINY = 1e-6


def fire_inputs(distance: Tensor, position: Tensor, slope: Tensor, threshold: Tensor) -> Tensor:
    """log(|c| d + 1) / log(|c| max(i, L) + 1) for distances d [B, T, Tk] and query positions i [B, T]; [B, T, Tk]."""
    slope = slope.abs()
    farthest = position.to(slope.dtype).maximum(threshold.abs())
    return (slope * distance.clamp(min=0) + 1.0).log() / ((slope * farthest + 1.0).log() + _TINY)[..., None]


class FireAttention(SoftmaxAttentionLayer):
    """Softmax attention with a learned function of relative distance that interpolates between lengths: FIRE.

    Source: Li et al. 2024, "Functional Interpolation for Relative Positions": bias_h(i, j) = f_h(log(c(i-j)+1) /
    log(c max(i, L)+1)), f an MLP with one hidden layer of 32 (ReLU) and an output for each head; c starts at 0.1 and
    L at init_length, both learned; positions count from 0. One function per layer (the paper's default, not the variant
    that shares one). torch's default init for the MLP, whose last Linear has no bias: the softmax would take it away.
    Path: torch's attention with the bias as a float mask.

    Options: hidden, width of the MLP; init_length, where L starts (512 in the paper's appendix).
    """

    name = "fire"

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        hidden: int = 32,
        init_length: float = 512.0,
        **more: Unpack[SoftmaxArguments],
    ) -> None:
        super().__init__(embed_dim, num_heads, num_kv_heads, hidden=hidden, init_length=init_length, **more)

    def add_parameters(self) -> None:
        super().add_parameters()
        self.bias_in = nn.Linear(1, self.option["hidden"])
        self.bias_out = nn.Linear(self.option["hidden"], self.num_heads, bias=False)
        self.slope = nn.Parameter(torch.tensor(0.1))
        self.length_factor = nn.Parameter(torch.tensor(1.0))  # L = length_factor * init_length

    @classmethod
    def check_options(cls, options: Options, num_heads: int, head_dim: int) -> None:
        super().check_options(options, num_heads, head_dim)
        if not isinstance(options["hidden"], int) or options["hidden"] < 1:
            raise InputError(f"attention option hidden must be a whole number above zero, got {options['hidden']!r}")
        if not options["init_length"] > 0:
            raise InputError(f"attention option init_length must be positive, got {options['init_length']!r}")

    def reset_own_parameters(self) -> None:
        super().reset_own_parameters()
        nn.init.constant_(self.slope, 0.1)
        nn.init.constant_(self.length_factor, 1.0)

    def make_tables(self, context: AttentionContext, hidden_states: Tensor) -> tuple[Tensor, ...]:
        length, device = hidden_states.shape[1], hidden_states.device
        return context.distances(length, device), context.positions(length, device)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, hidden_states: Tensor, context: AttentionContext
    ) -> tuple[Tensor, Tensor | None]:
        distance, position = self.tables(context)
        threshold = self.length_factor * self.option["init_length"]
        inputs = fire_inputs(distance, position, self.slope, threshold)  # [B or 1, T, Tk]
        bias = self.bias_out(F.relu(self.bias_in(inputs.unsqueeze(-1)))).permute(0, 3, 1, 2)
        return self.softmax_attention(q, k, v, context, self.scale, bias)
