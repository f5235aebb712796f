"""An LSTM layer: torch's fused one, and a step-by-step one that starts from any state, skips padding and restarts."""

from __future__ import annotations

import torch
from torch import Tensor

Weights = tuple[Tensor, Tensor, Tensor, Tensor]  # [4h, E], [4h, h], [4h], [4h]: input, forget, cell and output gates


def lstm(x: Tensor, weights: Weights) -> Tensor:
    """x [B, T, E] -> h [B, T, h], from a state of zeros."""
    zeros = x.new_zeros(1, x.shape[0], weights[1].shape[1])
    return torch.lstm(x, (zeros, zeros), list(weights), True, 1, 0.0, False, False, True)[0]


def lstm_steps(
    x: Tensor,
    weights: Weights,
    state: tuple[Tensor, Tensor],
    real: Tensor | None = None,
    restart: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """x [B, T, E], state h and c [B, h] -> all h and all c, each [B, T, h].

    real [B, T]: where False the state is handed on unchanged. restart [T]: where True the state is set to zeros first.
    """
    from_input, from_state, input_bias, state_bias = weights
    gates_of_x = torch.nn.functional.linear(x, from_input, input_bias + state_bias)  # [B, T, 4h]
    h, c = state
    all_h, all_c = [], []
    for step in range(x.shape[1]):
        if restart is not None:
            h, c = (part.masked_fill(restart[step], 0.0) for part in (h, c))
        enter, keep, new, leave = (gates_of_x[:, step] + h @ from_state.t()).chunk(4, dim=-1)
        next_c = keep.sigmoid() * c + enter.sigmoid() * new.tanh()
        next_h = leave.sigmoid() * next_c.tanh()
        if real is not None:
            moves = real[:, step, None]
            next_h, next_c = torch.where(moves, next_h, h), torch.where(moves, next_c, c)
        h, c = next_h, next_c
        all_h.append(h)
        all_c.append(c)
    return torch.stack(all_h, 1), torch.stack(all_c, 1)
