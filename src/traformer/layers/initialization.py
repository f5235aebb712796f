"""How modules start: torch's own defaults, unless a layer says otherwise. The same alone and in a model.

Only functions of torch.nn.init are used where there is one: transformers guards these while it loads a model, so that
they leave alone what came from a checkpoint.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from traformer.layers.norms import RMSNorm


@torch.no_grad()
def reset_module(module: nn.Module) -> None:
    """Initialise a Linear or a norm; anything else is initialised by the layer that holds it."""
    if isinstance(module, nn.Linear):
        reset_linear(module)
    elif isinstance(module, RMSNorm):
        nn.init.ones_(module.weight)


@torch.no_grad()
def reset_linear(linear: nn.Linear) -> None:
    """torch's own default, bias included, unless its layer says how the bias starts."""
    nn.init.kaiming_uniform_(linear.weight, a=math.sqrt(5))
    if linear.bias is not None and not reset_bias(linear):
        bound = 1.0 / math.sqrt(linear.in_features)
        nn.init.uniform_(linear.bias, -bound, bound)


@torch.no_grad()
def reset_bias(linear: nn.Linear) -> bool:
    """Set the bias to `bias_start`, a number or one per output, if its layer gave it one; returns whether it did."""
    if not hasattr(linear, "bias_start"):
        return False
    fill(linear.bias, linear.bias_start)
    return True


@torch.no_grad()
def fill(parameter: torch.Tensor, values: object) -> None:
    """Copy values into a parameter, unless transformers has loaded it."""
    if not getattr(parameter, "_is_hf_initialized", False):
        parameter.copy_(torch.as_tensor(values).expand_as(parameter))
