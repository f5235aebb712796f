"""Which device a run or an evaluation uses."""

from __future__ import annotations

import torch

from traformer.errors import InputError


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """`auto` is a GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"device {name!r} is not one that torch knows; try cpu or cuda") from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise InputError(
                f"device {name!r} was asked for, but torch sees no CUDA device; leave device at auto or cpu"
            )
        device = torch.device("cuda", local_rank if device.index is None else device.index)
        torch.cuda.set_device(device)
    return device
