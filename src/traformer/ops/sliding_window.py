"""Softmax attention within a window: block by block, so that time and memory grow with T times the window."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

QUERY_BLOCK = 512  # queries that read one stretch of keys


def windowed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    *,
    scale: float,
    query_start: int = 0,
    exclude_self: bool = False,
    dropout_p: float = 0.0,
    sinks: int = 0,
) -> Tensor:
    """q [B, H, T, D], k and v [B, H, Tk, D] -> [B, H, T, D]; query t, at place query_start + t, sees `window` keys.

    These are its own and the window - 1 before it; with exclude_self its own is left out, and a row without a key is 0.
    The first `sinks` keys are seen from everywhere after them.
    """
    outputs = []
    for begin in range(0, q.shape[2], QUERY_BLOCK):
        end = min(begin + QUERY_BLOCK, q.shape[2])
        first, last = max(0, query_start + begin - window + 1), query_start + end
        places = torch.arange(query_start + begin, last, device=q.device)
        keys = torch.arange(first, last, device=q.device)
        some_k, some_v = k[:, :, first:last], v[:, :, first:last]
        if always := min(sinks, first):  # the first keys that the stretch does not hold already
            keys = torch.cat((torch.arange(always, device=q.device), keys))
            some_k = torch.cat((k[:, :, :always], some_k), dim=2)
            some_v = torch.cat((v[:, :, :always], some_v), dim=2)
        distance = places[:, None] - keys  # [queries, keys]
        visible = (distance >= int(exclude_self)) & ((distance < window) | (keys < sinks))
        block = F.scaled_dot_product_attention(q[:, :, begin:end], some_k, some_v, visible, dropout_p, scale=scale)
        outputs.append(block)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
