"""An LSTM in place of attention: the skyline for tasks that need a memory and no search."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from traformer.layers.base import AttentionLayer
from traformer.layers.context import AttentionContext
from traformer.ops.eager import widened
from traformer.ops.lstm import Weights, lstm, lstm_steps


class LSTMLayer(AttentionLayer):
    """An LSTM of equal size in place of attention: a skyline, not a peer (no keys, no weights to look at).

    Source: Hochreiter, Schmidhuber 1997 with forget gates, as torch has it; the rest of the trunk (norms, residual,
    MLP) stays. Its width is the largest at which the LSTM and its output projection have no more parameters than full
    attention's four projections. torch's default init for nn.LSTM, uniform in +-1/sqrt(width). qk_norm and the head
    counts have no meaning for it. A cache holds h and c of every token. attention_dropout acts on the LSTM's output.
    Path: torch's fused LSTM from the first token on; step by step from a cache, with padding or with packing.
    """

    name = "lstm"

    def add_parameters(self) -> None:  # none of attention's projections
        size = self.embed_dim
        self.width = lstm_width(size, 4 * size * self.num_heads * self.head_dim + size)
        self.from_input = nn.Parameter(torch.empty(4 * self.width, size))
        self.from_state = nn.Parameter(torch.empty(4 * self.width, self.width))
        self.input_bias = nn.Parameter(torch.empty(4 * self.width))
        self.state_bias = nn.Parameter(torch.empty(4 * self.width))
        self.o_proj = nn.Linear(self.width, size, bias=True)

    def reset_own_parameters(self) -> None:
        bound = 1.0 / math.sqrt(self.width)
        for parameter in self.weights():
            nn.init.uniform_(parameter, -bound, bound)

    def weights(self) -> Weights:
        return self.from_input, self.from_state, self.input_bias, self.state_bias

    def mix(self, hidden_states: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor | None]:
        length = hidden_states.shape[1]
        cache, real = context.past_key_values, context.new_token_mask(length)
        # A recurrence rounds at every step: never in half precision, under autocast neither.
        with torch.autocast(hidden_states.device.type, enabled=False):
            x = widened(hidden_states)
            weights = tuple(part.to(x.dtype) for part in self.weights())
            if cache is None and real is None and context.cu_seqlens is None:
                out = lstm(x, weights)  # type: ignore[arg-type]
            else:
                out = self._steps(x, weights, real, context)  # type: ignore[arg-type]
        out = F.dropout(out, self.dropout_p, self.training).to(hidden_states.dtype)
        return self.o_proj(out), None

    def _steps(self, x: Tensor, weights: Weights, real: Tensor | None, context: AttentionContext) -> Tensor:
        batch, length, _ = x.shape
        if real is not None:
            x = x.masked_fill(~real[..., None], 0.0)
        zeros = x.new_zeros(batch, self.width)
        state, restart, cache = (zeros, zeros), None, context.past_key_values
        if context.cu_seqlens is not None:
            places = torch.arange(length, device=x.device, dtype=context.cu_seqlens.dtype)
            restart = torch.isin(places, context.cu_seqlens)
        if cache is not None and _holds_something(context):
            layer = context.layer_cache(self.layer_idx)
            assert layer is not None and layer.keys is not None and layer.values is not None
            state = _last(layer.keys[:, 0], context), _last(layer.values[:, 0], context)
        h, c = lstm_steps(x, weights, state, real, restart)
        if cache is not None:
            self.remember(h[:, None], c[:, None], context)
        return h


def lstm_width(size: int, budget: int) -> int:
    """The largest width h with 4h(size + h) + 8h + h * size + size <= budget."""
    linear, constant = 5 * size + 8, size - budget
    return max(1, int((-linear + math.sqrt(linear**2 - 16 * constant)) / 8))


def _holds_something(context: AttentionContext) -> bool:
    return isinstance(context.query_start, Tensor) or context.query_start > 0


def _last(states: Tensor, context: AttentionContext) -> Tensor:
    """The state after the last token of the past, [B, Tk, h] -> [B, h]. An empty static cache holds zeros: a start."""
    place = torch.as_tensor(context.query_start, device=states.device).reshape(1) - 1
    return states.index_select(1, place.clamp(min=0))[:, 0]
