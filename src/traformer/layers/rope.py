"""Rotary position embedding (RoPE), the usual choice and the baseline TRA is compared with."""

from __future__ import annotations

from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from traformer.errors import InputError
from traformer.layers.context import AttentionContext
from traformer.layers.options import SoftmaxArguments
from traformer.layers.softmax import SoftmaxAttentionLayer
from traformer.ops.eager import expand_heads
from traformer.ops.rope import apply_rope, rope_tables
from traformer.types import Options


class RotaryAttention(SoftmaxAttentionLayer):
    """Softmax attention on rotated queries and keys.

    Source: Su et al. 2021, "RoFormer": logit_ij = (R_i q_i) . (R_j k_j) / sqrt(d), where R_t turns the channel pair n
    by the angle t theta^(-2n/d); a pair is a channel and the one half a head size on, as in Llama; theta is 500,000.
    Path: torch's fused causal kernel.

    With a sliding window, `sinks` keeps the first keys of the sequence in sight: trained softmax attention rests on
    them where nothing else fits, and breaks without them (Xiao et al. 2023, "Efficient Streaming Language Models with
    Attention Sinks"). As there, a sink never seems farther away than where it left the window: from then on the query
    meets it as if at place window + sinks - 1, so that no distance grows with the length.
    """

    name = "rope"

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        theta: float = 500_000.0,
        sinks: int = 0,
        **more: Unpack[SoftmaxArguments],
    ) -> None:
        super().__init__(embed_dim, num_heads, num_kv_heads, theta=theta, sinks=sinks, **more)

    @classmethod
    def check_options(cls, options: Options, num_heads: int, head_dim: int) -> None:
        super().check_options(options, num_heads, head_dim)
        if head_dim % 2:
            raise InputError(f"attention 'rope' turns pairs of channels and needs an even head_dim, not {head_dim}")
        if not options["theta"] > 0:
            raise InputError(f"attention option theta must be positive, got {options['theta']}")
        sinks = options["sinks"]
        if not isinstance(sinks, int) or isinstance(sinks, bool) or sinks < 0:
            raise InputError(f"attention option sinks must be a whole number, 0 or more, got {sinks!r}")
        if sinks and options["sliding_window"] is None:
            raise InputError("attention option sinks goes with sliding_window: without one every key is seen anyway")

    def make_tables(self, context: AttentionContext, hidden_states: Tensor) -> tuple[Tensor, ...]:
        positions = context.positions(hidden_states.shape[1], hidden_states.device)
        return rope_tables(positions, self.head_dim, self.option["theta"], hidden_states.dtype)

    def place(self, q: Tensor, k: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor]:
        tables = self.tables(context)
        return apply_rope(q, tables).to(q.dtype), apply_rope(k, tables).to(k.dtype)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, hidden_states: Tensor, context: AttentionContext
    ) -> tuple[Tensor, Tensor | None]:
        if not self.sinks or self.window is None or context.ends_before(self.window + self.sinks, q.shape[2]):
            return super().attend(q, k, v, hidden_states, context)
        if self.sees_by_order(context):
            if q.shape[2] == 1 and self.excluded_heads is False:
                return self._attend_one(q, k, v), None
            # The sinks and what the first query still sees: the keys between them are read by none.
            near = max(self.sinks, k.shape[2] - q.shape[2] - self.window + 1)
            k, v = (torch.cat((x[:, :, : self.sinks], x[:, :, near:]), dim=2) for x in (k, v))
        # Twice the channels: the query as it is against the keys that are no sinks, and turned back against the sinks.
        places = context.places(q.shape[2], q.device)
        beyond = (places - (self.window + self.sinks - 1)).clamp(min=0)  # [B or 1, T]
        turned = apply_rope(q, rope_tables(-beyond, self.head_dim, self.option["theta"], q.dtype)).to(q.dtype)
        is_sink = context.first_keys(self.sinks, k.shape[2], q.device).transpose(-1, -2)  # [B or 1, 1, Tk, 1]
        keys = torch.cat((k.masked_fill(is_sink, 0.0), k.masked_fill(~is_sink, 0.0)), dim=-1)
        values = F.pad(v, (0, self.head_dim))
        out, weights = self.softmax_attention(torch.cat((q, turned), dim=-1), keys, values, context, self.scale)
        return out[..., : self.head_dim], weights

    def _attend_one(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One query beyond the window: the sinks, turned to where they seem to be, and the keys of the window."""
        assert self.window is not None
        beyond = torch.tensor([[k.shape[2] - self.window - self.sinks]], device=q.device)
        tables = rope_tables(beyond, self.head_dim, self.option["theta"], q.dtype)
        first = apply_rope(k[:, :, : self.sinks], tables).to(k.dtype)
        keys = torch.cat((first, k[:, :, -self.window :]), dim=2)
        values = torch.cat((v[:, :, : self.sinks], v[:, :, -self.window :]), dim=2)
        keys, values = expand_heads(keys, self.num_heads), expand_heads(values, self.num_heads)
        dropout_p = self.dropout_p if self.training else 0.0
        return F.scaled_dot_product_attention(q, keys, values, None, dropout_p, scale=self.scale)
