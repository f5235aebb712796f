"""How a Linear starts, in our decoder and in what conversion adds to another's."""

from __future__ import annotations

import math

import torch
from torch import nn
from transformers import initialization as init


def start_linear(linear: nn.Linear) -> None:
    """torch's own default, bias included, unless its layer says how the bias starts."""
    init.kaiming_uniform_(linear.weight, a=math.sqrt(5))
    if linear.bias is not None and not start_bias(linear):
        bound = 1.0 / math.sqrt(linear.in_features)
        init.uniform_(linear.bias, -bound, bound)


def start_bias(linear: nn.Linear) -> bool:
    """Sets the bias to `bias_start`, a number or one an output, if its layer gave it one; tells whether it did."""
    if not hasattr(linear, "bias_start"):
        return False
    init.copy_(linear.bias, torch.as_tensor(linear.bias_start).expand_as(linear.bias))  # type: ignore[arg-type]
    return True
