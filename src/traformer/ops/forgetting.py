"""Forgetting attention: softmax with a bias that sums the log forget gates of all tokens in between."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from traformer.ops.alibi import with_key_bias

PRUNING_BLOCK = 512  # queries that share one leftmost key


def leftmost_keys(cumulative: Tensor, score_bound: float, tolerance: float) -> list[list[int]]:
    """For each head and block of queries the first key whose weight can matter: pruning after Lin et al. 2025.

    cumulative [B, H, T]: running sum of the log forget gates. Logit ij lies within +-score_bound of cumulative_i -
    cumulative_j, so the keys at which the bias is below -(2 score_bound + log T + log 1/tolerance) weigh less than
    `tolerance` together.
    """
    length = cumulative.shape[-1]
    limit = 2.0 * score_bound + math.log(length) - math.log(tolerance)
    first_rows = cumulative[..., ::PRUNING_BLOCK]  # [B, H, blocks]: a block's first query reaches farthest
    # -cumulative rises along the keys, and so does the bias: everything left of the first key within the limit is out.
    reach = torch.searchsorted((-cumulative).contiguous(), (-first_rows - limit).contiguous())
    return reach.amin(0).tolist()  # [H][blocks], the farthest reach in the batch


def pruned_forgetting_attention(
    q: Tensor, k: Tensor, v: Tensor, cumulative: Tensor, leftmost: list[list[int]], scale: float
) -> Tensor:
    """Causal attention that reads each block's keys from `leftmost` on; q, k, v [B, H, T, D], cumulative [B, H, T]."""
    length = q.shape[2]
    heads = []
    for head, starts in enumerate(leftmost):
        blocks = []
        for index, start in enumerate(starts):
            begin = index * PRUNING_BLOCK
            end = min(begin + PRUNING_BLOCK, length)
            queries, keys = slice(begin, end), slice(start, end)
            one = slice(head, head + 1)
            biases = -cumulative[:, one, keys], -cumulative[:, one, queries]
            inputs = with_key_bias(q[:, one, queries], k[:, one, keys], v[:, one, keys], *biases, scale)
            mask = torch.ones(end - begin, end - start, dtype=torch.bool, device=q.device).tril(begin - start)
            blocks.append(F.scaled_dot_product_attention(*inputs, mask, scale=1.0)[..., : v.shape[-1]])
        heads.append(torch.cat(blocks, dim=2))
    return torch.cat(heads, dim=1)
