"""Which device a run or an evaluation uses, how many threads, and how these treat denormal numbers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from traformer.errors import InputError
from traformer.ops.threshold_relative.cpu import set_flush_denormals

LEAST_THREAD_LIMIT = 64


@contextmanager
def flush_denormals() -> Iterator[None]:
    """Denormal numbers count as zero in torch's CPU threads within this block, or in a function that this decorates.

    Attention weights that underflow become denormal, and on Intel each operation on such a number takes some 150
    cycles: docs/kernel.md has what that costs each method.
    """
    before = set_flush_denormals(True)
    try:
        yield
    finally:
        set_flush_denormals(before)


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """The device of that name; `auto` is a GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"device {name!r} is not one that torch knows; give cpu, cuda or auto") from None
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise InputError(f"device is {name!r}, but torch sees no CUDA device; give cpu or auto")
        device = torch.device("cuda", local_rank if device.index is None else device.index)
        if device.index >= torch.cuda.device_count():
            raise InputError(
                f"device is {name!r}, but torch sees {torch.cuda.device_count()} CUDA devices, counted from 0"
            )
        torch.cuda.set_device(device)
        return device
    try:
        holds_numbers = torch.ones(1, device=device).item() == 1.0
    except Exception:  # each backend has its own way to say that it is not there
        holds_numbers = False
    if not holds_numbers:
        raise InputError(f"device {name!r} cannot compute here; give cpu, cuda or auto")
    return device


def computes_on_cpu(name: str) -> bool:
    """Whether `choose_device` gives the CPU for this name, without using any device."""
    return name == "cpu" or (name == "auto" and not torch.cuda.is_available())


def set_threads(threads: int | None) -> None:
    """Threads of torch on the CPU; None leaves torch's own choice.

    More than a few per core only slow a run down, and some hundreds of thousands bring the process down: the limit is
    4 per core, or 64 on small machines, where a run of a larger one may have to be repeated to the bit.
    """
    if threads is None:
        return
    limit = max(LEAST_THREAD_LIMIT, 4 * (os.cpu_count() or 1))
    if not 1 <= threads <= limit:
        raise InputError(f"threads is {threads}; give 1 to {limit} on this machine, which has {os.cpu_count()} CPUs")
    torch.set_num_threads(threads)
