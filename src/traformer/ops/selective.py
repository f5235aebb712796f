"""Selective attention: tokens mask keys that later tokens no longer need."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from traformer.ops.eager import BlockOptions, attend_in_blocks, content_scores, softmax_over, widened


def selection_mask(selection_q: Tensor, selection_k: Tensor, visible: Tensor, scale: float) -> Tensor:
    """F_ij = sum over tokens t with j < t < i of max(s_tj, 0): what is taken off logit ij; [B, T, T].

    selection_q, selection_k [B, T, D]: of the head that selects; visible [B or 1, 1, T, T]. No token masks itself or
    the first of its sequence, and what a token masks is masked for those after it only.
    """
    scores = (widened(selection_q * scale) @ widened(selection_k).transpose(-2, -1)).relu()
    visible = visible[:, 0]
    length = scores.shape[-1]
    itself = torch.eye(length, dtype=torch.bool, device=scores.device)
    first = visible.cumsum(-1) == 1  # the leftmost visible key of each row (and what lies between it and the next)
    chosen = torch.where(visible & ~itself & ~first, scores, 0.0)
    return chosen.cumsum(-2) - chosen  # strictly earlier rows


def selective_attention(
    q: Tensor, k: Tensor, v: Tensor, masked: Tensor, visible: Tensor, *, scale: float, **blocks: Unpack[BlockOptions]
) -> tuple[Tensor, Tensor | None]:
    """Softmax of s_ij - F_ij for all heads, with masked = F [B, T, Tk] of these queries."""

    def weigh(q: Tensor, k: Tensor, visible: Tensor, masked: Tensor) -> Tensor:
        return softmax_over(content_scores(q, k, scale) - masked[..., : k.shape[2]], visible)

    return attend_in_blocks(weigh, q, k, v, visible, (masked[:, None],), **blocks)
