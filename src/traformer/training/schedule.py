"""The learning rate as a function of the step, so that resuming needs no scheduler state."""

from __future__ import annotations

import math


def learning_rate(step: int, *, steps: int, peak: float, warmup: float, minimum: float = 0.0) -> float:
    """Rate of step `step` (0-based): linear up to `peak` over the first `warmup` share, then a cosine to `minimum`."""
    rising = math.ceil(steps * warmup)
    if step < rising:
        return peak * (step + 1) / rising
    progress = (step - rising) / max(1, steps - rising)
    return minimum + (peak - minimum) * 0.5 * (1.0 + math.cos(math.pi * progress))
