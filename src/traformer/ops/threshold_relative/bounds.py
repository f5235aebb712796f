"""How much the keys not yet read can still weigh: the proof behind the early exit, in logarithms."""

from __future__ import annotations

import torch
from torch import Tensor


def log_tail(
    bound: Tensor,
    log_decay: Tensor,
    kept: Tensor,
    remaining: Tensor,
    needs_grad: bool,
    surrogate_width: float = 0.0,
    threshold: Tensor | float = 0.0,
) -> Tensor:
    """Log of an upper bound of the weight beyond the `kept` nearest kept keys (weights in the c-1 shift).

    bound: upper bound U of any score still unread; log_decay: g <= 0; remaining: keys not yet read (n).
    Forward:   e^(U + gC) min( 1/(1-e^g), n )
    Gradients: e^(U + gC) min( (C + 1/(1-e^g))/(1-e^g), n (C + n) ), since d log_decay carries a factor c.
    At g = 0 the first form is infinite and the second holds. All arguments broadcast.
    With a surrogate of width w every key has one more term, at most 1/(4w) times its weight, and removed keys have it
    too. There may be n of those, but each would weigh no more than e^(threshold + gC), since its score is not above the
    threshold: e^(U + gC) ( min(...) + (min(1/(1-e^g), n) + n e^(min(threshold, U) - U)) / (4w) ).
    """
    kept = kept.to(log_decay.dtype)
    remaining = remaining.to(log_decay.dtype)
    decay_gap = torch.expm1(log_decay).abs()  # 1 - e^g without cancellation; +0 at g = 0
    if surrogate_width:
        longest = 1 / decay_gap
        weights = torch.minimum((kept + longest) * longest, remaining * (kept + remaining))
        removed = remaining * torch.exp((threshold - bound).clamp(max=0.0))
        soft = (torch.minimum(longest, remaining) + removed) * (0.25 / surrogate_width)
        return bound + log_decay * kept + torch.log(weights + soft)
    if needs_grad:
        geometric = torch.log(kept + 1 / decay_gap) - torch.log(decay_gap)
        plain = torch.log(remaining) + torch.log(kept + remaining)
    else:
        geometric = -torch.log(decay_gap)
        plain = torch.log(remaining)
    return bound + log_decay * kept + torch.minimum(geometric, plain)


def finished(
    bound: Tensor,
    log_decay: Tensor,
    kept: Tensor,
    remaining: Tensor,
    log_total: Tensor,
    log_tolerance: float,
    needs_grad: bool,
    surrogate_width: float = 0.0,
    threshold: Tensor | float = 0.0,
) -> Tensor:
    """True for rows whose unread keys weigh at most tolerance times what was read. A NaN anywhere never finishes."""
    tail = log_tail(bound, log_decay, kept, remaining, needs_grad, surrogate_width, threshold)
    return (remaining <= 0) | ((kept > 0) & (tail <= log_tolerance + log_total))
