"""Pieces that the methods without a fused kernel share: scores, softmax over visible keys, dropout, blocks of queries.

Everywhere: q [B, Hq, T, D]; k, v [B, Hkv, Tk, D]; visible bool [B or 1, 1, T, Tk], True = the query may see the key.
Sums are held in fp32 (fp64 for fp64 inputs).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from traformer import query_blocks


def expand_heads(x: Tensor, heads: int) -> Tensor:
    """[B, Hkv, T, D] -> [B, heads, T, D]: query head h reads key head h // (heads / Hkv)."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def widened(x: Tensor) -> Tensor:
    """The type that sums are held in."""
    return x if x.dtype == torch.float64 else x.float()


def widest(device: torch.device) -> torch.dtype:
    """fp64 where the device has it: for positions and running sums, whose small differences count."""
    return torch.float32 if device.type == "mps" else torch.float64


def relative_bias(key_bias: Tensor, query_bias: Tensor, scores: Tensor) -> Tensor:
    """key_bias [B or 1, H, Tk] as seen from each query, whose own is query_bias [B or 1, H, T, 1]: [B or 1, H, T, Tk].

    It is 0 at the query's own key, so that near keys lose nothing in the type of the scores, however large the sums.
    """
    return (key_bias[:, :, None, : scores.shape[-1]] - query_bias).to(scores.dtype)


def content_scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """q.k * scale, [B, Hq, T, Tk]."""
    return widened(q * scale) @ widened(expand_heads(k, q.shape[1])).transpose(-2, -1)


def softmax_over(logits: Tensor, visible: Tensor) -> Tensor:
    """Softmax over the visible keys; a row that sees none has weight 0 everywhere, and gradient 0."""
    return logits.masked_fill(~visible, float("-inf")).softmax(-1).masked_fill(~visible, 0.0)


def mix_values(weights: Tensor, v: Tensor, dropout_p: float) -> Tensor:
    """Weights [B, Hq, T, Tk] (some dropped) times values -> [B, Hq, T, D] in the type of v."""
    if dropout_p > 0.0:
        weights = F.dropout(weights, dropout_p)
    return weights.to(v.dtype) @ expand_heads(v, weights.shape[1])


def reverse_cumsum(x: Tensor) -> Tensor:
    """sum over l >= j of x_l, along the last axis."""
    return x.flip(-1).cumsum(-1).flip(-1)


def queries_at_once(q: Tensor, k: Tensor) -> int:
    """The length of a block of queries. A compiled graph would hold every block, so its blocks are as on a GPU."""
    on_cpu = q.device.type == "cpu" and not torch.compiler.is_compiling()
    return query_blocks.queries_at_once(q.shape[0], q.shape[1], k.shape[2], on_cpu)


class BlockOptions(TypedDict, total=False):
    """What every eager attention takes besides its scale, handed on to `attend_in_blocks`."""

    dropout_p: float  # on the weights
    query_start: int | Tensor  # position of the first query on the key axis
    need_weights: bool  # return the weights too, [B, Hq, T, Tk]; all queries then make one block


def attend_in_blocks(
    weigh: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    per_query: Sequence[Tensor] = (),
    *,
    dropout_p: float = 0.0,
    query_start: int | Tensor = 0,
    need_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Values mixed by the weights [B, Hq, T, Tk] = weigh(q, k, visible, *per_query), over blocks of queries if many.

    per_query: tensors [B, H, T, ...] that are cut along with q. A block reads no key after its end. Under autograd the
    blocks of more than QUERY_BLOCK queries keep nothing but their inputs (they are computed again in the backward), so
    that memory grows with T and not with T^2.
    """

    def rows(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, *per_query: Tensor) -> tuple[Tensor, Tensor]:
        weights = weigh(q, k, visible, *per_query)
        return mix_values(weights, v, dropout_p), weights

    length, block = q.shape[2], queries_at_once(q, k)
    if need_weights or length <= block:
        out, weights = rows(q, k, v, visible, *per_query)
        return out, weights if need_weights else None
    outputs = []
    for start in range(0, length, block):
        cut = slice(start, min(start + block, length))
        end = k.shape[2] if isinstance(query_start, Tensor) else query_start + cut.stop
        inputs = (
            q[:, :, cut],
            k[:, :, :end],
            v[:, :, :end],
            visible[:, :, cut, :end],
            *(x[:, :, cut] for x in per_query),
        )
        if torch.is_grad_enabled() and length > query_blocks.QUERY_BLOCK:
            outputs.append(checkpoint(rows, *inputs, use_reentrant=False)[0])
        else:
            outputs.append(rows(*inputs)[0])
    return torch.cat(outputs, dim=2), None
