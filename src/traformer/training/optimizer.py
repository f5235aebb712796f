"""AdamW, its learning rate, and its state as named whole tensors that any number of processes can write and read."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from traformer.errors import RunError
from traformer.runs.config import RunConfig
from traformer.training.parallel import Parallel, shard_like, whole


def build_optimizer(
    parameters: Mapping[str, nn.Parameter], lr_scales: Mapping[str, float], config: RunConfig, parallel: Parallel
) -> torch.optim.AdamW:
    """One group for each learning-rate factor (a parameter's `lr_scale`, 1 unless its layer says otherwise)."""
    groups: dict[float, list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        groups.setdefault(lr_scales.get(name, 1.0), []).append(parameter)
    return torch.optim.AdamW(
        [{"params": members, "lr_scale": scale} for scale, members in groups.items()],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        weight_decay=config.weight_decay,
        fused=parallel.kind != "fsdp",
    )


def learning_rate(step: int, *, steps: int, peak: float, warmup: float, minimum: float = 0.0) -> float:
    """The rate as a function of the step alone, so that resuming needs no scheduler state.

    Rate of step `step` (0-based): linear up to `peak` over the first `warmup` share, then a cosine to `minimum`.
    """
    rising = math.ceil(steps * warmup)
    if step < rising:
        return peak * (step + 1) / rising
    progress = (step - rising) / max(1, steps - rising)
    return minimum + (peak - minimum) * 0.5 * (1.0 + math.cos(math.pi * progress))


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def optimizer_tensors(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """`<state name>/<parameter name>` -> whole tensor. Every process takes part."""
    return {
        f"{key}/{name}": whole(value)
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]
) -> None:
    """The inverse of `optimizer_tensors`, whatever the number of processes now."""
    for full_name, tensor in tensors.items():
        key, _, name = full_name.partition("/")
        if name not in parameters:
            raise RunError(f"the checkpoint's optimizer state names a parameter {name!r} that the model does not have")
        parameter = parameters[name]
        # The step count is one number for the whole parameter and is never sharded.
        optimizer.state[parameter][key] = tensor.clone() if tensor.dim() == 0 else shard_like(tensor, parameter)
