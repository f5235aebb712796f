"""Cross-entropy of an output head without ever holding [tokens, vocabulary].

Rows go through the head in chunks; a chunk's logits become its gradient in place, and only the gradients of the hidden
states [N, E] and of the weight [V, E] outlive it. Three matrix products in all, as the plain way has: nothing is
computed twice.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

# Logits held at once: large enough for full speed of the matrix products, 64 MiB in float32.
CHUNK_ELEMENTS = 1 << 24


def chunk_rows(rows: int, vocabulary: int, elements: int | None = None) -> int:
    """Rows of a chunk so that all chunks are about equal and none holds more logits than allowed."""
    most = max(1, (CHUNK_ELEMENTS if elements is None else elements) // vocabulary)
    chunks = max(1, -(-rows // most))
    return max(1, -(-rows // chunks))


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk_elements: int | None = None
) -> tuple[Tensor, Tensor]:
    """Sum over rows of -log softmax(hidden @ weight.T)[target], and how many rows have their target as argmax.

    hidden [N, E], weight [V, E], targets [N]. Logits and the softmax are in float32 (float64 for float64 inputs); under
    autocast the matrix products run in its dtype, as a Linear's would.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        return _LinearCrossEntropy.apply(hidden, weight, targets, chunk_elements)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk_elements: int | None
    ) -> tuple[Tensor, Tensor]:
        rows, vocabulary = hidden.shape[0], weight.shape[0]
        size = chunk_rows(rows, vocabulary, chunk_elements)
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        right = torch.zeros((), dtype=torch.int64, device=hidden.device)
        for start in range(0, rows, size):
            part = slice(start, min(start + size, rows))
            logits = F.linear(hidden[part], weight).to(wide)  # [n, V]
            target = targets[part, None]  # [n, 1]
            guess = logits.argmax(-1, keepdim=True)
            right += (guess == target).sum()
            highest = logits.gather(1, guess)
            wanted = logits.gather(1, target) - highest
            shares = logits.sub_(highest).exp_()  # not yet divided by their sum
            total = shares.sum(-1, keepdim=True)
            loss += (total.log() - wanted).sum()
            if grad_hidden is None and grad_weight is None:
                continue
            # d loss / d logits = softmax - one at the target
            shares.div_(total).scatter_add_(1, target, torch.full_like(total, -1.0))
            gradient = shares.to(hidden.dtype)
            add_gradients(gradient, hidden, weight, part, grad_hidden, grad_weight)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(right)
        return loss, right

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        return *scaled_gradients(ctx, grad_loss), None, None


def add_gradients(
    gradient: Tensor,
    hidden: Tensor,
    weight: Tensor,
    part: slice,
    grad_hidden: Tensor | None,
    grad_weight: Tensor | None,
) -> None:
    """Adds what one part of the tokens gives a chunked loss's gradients; `gradient` is that of the part's logits."""
    if grad_hidden is not None:
        torch.mm(gradient, weight, out=grad_hidden[part])
    if grad_weight is not None:
        if grad_weight.dtype == gradient.dtype:
            grad_weight.addmm_(gradient.t(), hidden[part])
        else:
            grad_weight += gradient.t() @ hidden[part]


def scaled_gradients(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """What a chunked loss saved in its forward (gradients of hidden states and head, or None), times the loss's own."""
    grad_hidden, grad_weight = ctx.saved_tensors
    return (
        None if grad_hidden is None else grad_hidden * grad_loss.to(grad_hidden.dtype),
        None if grad_weight is None else (grad_weight * grad_loss).to(ctx.weight_dtype),
    )


def token_losses(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """-log softmax(hidden @ weight.T)[target] of every row, without gradients, in chunks; [N] in float32 or wider."""
    rows, vocabulary = hidden.shape[0], weight.shape[0]
    size = chunk_rows(rows, vocabulary)
    parts = []
    for start in range(0, rows, size):
        logits = F.linear(hidden[start : start + size], weight)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        parts.append(F.cross_entropy(logits, targets[start : start + size], reduction="none"))
    return torch.cat(parts)
