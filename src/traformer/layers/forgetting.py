"""The Forgetting Transformer's attention (FoT, also FoX)."""

from __future__ import annotations

from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from traformer.layers.context import AttentionContext
from traformer.layers.options import SoftmaxArguments, gate_biases
from traformer.layers.softmax import SoftmaxAttentionLayer
from traformer.ops.eager import expand_heads, widest
from traformer.ops.forgetting import PRUNING_BLOCK, leftmost_keys, pruned_forgetting_attention

# Pruning pays only on long inputs, and only if it saves at least this share of the key blocks.
_WORTHWHILE = 0.3


def log_forget_gates(gate: Tensor, context: AttentionContext, num_key_heads: int) -> Tensor:
    """Gate logits [B, T, Hq] -> log forget gates as the keys' state, [B, Hkv, T, Hq / Hkv]; 0 at padded places."""
    batch, length, heads = gate.shape
    log_forget = F.logsigmoid(gate if gate.dtype == torch.float64 else gate.float())
    real = context.new_token_mask(length)
    if real is not None:
        log_forget = log_forget.masked_fill(~real[..., None], 0.0)
    return log_forget.view(batch, length, num_key_heads, heads // num_key_heads).transpose(1, 2)


def cumulative_gates(state: Tensor) -> Tensor:
    """[B, Hkv, Tk, groups] -> running sums [B, Hq, Tk] in fp64: the bias of query i and key j is C_i - C_j."""
    batch, key_heads, key_count, groups = state.shape
    return state.to(widest(state.device)).cumsum(2).transpose(2, 3).reshape(batch, key_heads * groups, key_count)


class ForgettingAttention(SoftmaxAttentionLayer):
    """Softmax attention with a forget gate: the bias sums the log gates of every token between query and key.

    Source: Lin et al. 2025, "Forgetting Transformer": f_t = sigmoid(w_h . x_t + b_h), one gate per head, logit_ij =
    s_ij + sum over l = j+1 .. i of log f_l. Adds a Linear(width, heads) with bias, torch's default init; no other
    position embedding, which is the paper's own choice. The "Pro" block's additions (output gate and norm, key/value
    shift) are not part of the mechanism and are left out. The log gates are cached beside the keys.
    Path: the bias C_i - C_j is channels of query and key in torch's fused kernel. Adaptive computation pruning (Lin et
    al. 2025b) where it pays: plain causal inputs of 2 blocks or more in which the gates leave out enough keys.

    Options besides those of every softmax method:
        gate_bias  where the gates' biases start: a number, one per head, or "halves", as in TRA's variants
        tolerance  share of a row's weight that pruning may drop (the authors use e^-10; here 2^-24, as TRA's early
                   exit, so that speed is compared at equal exactness); 0 reads every key. Pruning needs the own key
    """

    name = "fot"

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        gate_bias: float | str | list[float] | None = None,
        tolerance: float = 2.0**-24,
        **more: Unpack[SoftmaxArguments],
    ) -> None:
        super().__init__(embed_dim, num_heads, num_kv_heads, gate_bias=gate_bias, tolerance=tolerance, **more)

    def add_parameters(self) -> None:
        super().add_parameters()
        self.forget_proj = nn.Linear(self.embed_dim, self.num_heads, bias=True)
        if self.option["gate_bias"] is not None:
            self.forget_proj.bias_start = gate_biases(self.option["gate_bias"], self.num_heads)  # type: ignore[assignment]

    def key_state(self, q: Tensor, hidden_states: Tensor, context: AttentionContext) -> Tensor:
        return log_forget_gates(self.forget_proj(hidden_states), context, self.num_key_heads)

    def attend(  # type: ignore[override]
        self, q: Tensor, k: Tensor, v: Tensor, hidden_states: Tensor, context: AttentionContext, state: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        cumulative = cumulative_gates(state)
        leftmost = self._leftmost_keys(q, k, cumulative, context)
        if leftmost is not None:
            k, v = expand_heads(k, self.num_heads), expand_heads(v, self.num_heads)
            return pruned_forgetting_attention(q, k, v, cumulative, leftmost, self.scale), None
        return self.key_biased_attention(q, k, v, context, -cumulative)

    def _leftmost_keys(
        self, q: Tensor, k: Tensor, cumulative: Tensor, context: AttentionContext
    ) -> list[list[int]] | None:
        """Where each head's blocks may begin to read, or None where pruning does not apply or does not pay."""
        length = q.shape[2]
        unsuitable = context.output_attentions or (self.training and self.dropout_p > 0.0)
        if length < 2 * PRUNING_BLOCK or not self.option["tolerance"] or unsuitable or torch.compiler.is_compiling():
            return None
        if self.window is not None or self.excluded_heads is not False or not context.is_plain_causal(length):
            return None  # the bound holds relative to the query's own key
        with torch.no_grad():
            bound = self.score_bound(q.dtype, k.shape[2])
            if bound is None:
                bound = q.float().norm(dim=-1).max() * k.float().norm(dim=-1).max() * self.scale
            largest = float(bound.max()) if isinstance(bound, Tensor) else bound
            leftmost = leftmost_keys(cumulative, largest, self.option["tolerance"])
        ends = [min(start + PRUNING_BLOCK, length) for start in range(0, length, PRUNING_BLOCK)]
        read = sum(end - start for starts in leftmost for start, end in zip(starts, ends, strict=True))
        return leftmost if read < (1.0 - _WORTHWHILE) * self.num_heads * sum(ends) else None
