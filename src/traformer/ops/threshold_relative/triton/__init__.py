"""Backend "triton": the walk from the diagonal to the left on a GPU. docs/gpu.md describes it.

Nothing of triton is imported before a kernel is needed, so that this module loads where it is not installed.
"""

from __future__ import annotations

import functools
import os
from importlib.util import find_spec

import torch
from torch import Tensor

from traformer.errors import InputError
from traformer.ops.threshold_relative.options import check_values
from traformer.ops.threshold_relative.problem import Forward, Gradients, Problem, Saved
from traformer.ops.threshold_relative.triton.configurations import LARGEST_HEAD, MOST_KEYS

INTERPRET_VARIABLE = "TRITON_INTERPRET"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def interpreted() -> bool:
    """Whether triton runs kernels on the CPU, which it decides when it is first imported."""
    return os.environ.get(INTERPRET_VARIABLE) == "1"


def unavailable_reason() -> str | None:
    """None where the kernels can run, else one clause that says why not."""
    if find_spec("triton") is None:
        return "backend 'triton' needs the package triton, which is not installed"
    if not interpreted() and not _has_gpu():
        return (
            f"backend 'triton' needs a CUDA or ROCm GPU, and torch sees none ({INTERPRET_VARIABLE}=1 runs it on a CPU)"
        )
    return None


@functools.cache
def _has_gpu() -> bool:
    return torch.cuda.is_available()


def is_available() -> bool:
    return unavailable_reason() is None


def unsupported_reason(dtype: torch.dtype, head_size: int) -> str | None:
    """None where the kernels handle such tensors, else why not."""
    if dtype not in _DTYPES:
        return f"backend 'triton' takes float32, bfloat16 and float16, not {dtype}"
    if head_size > LARGEST_HEAD:
        return f"backend 'triton' takes head sizes up to {LARGEST_HEAD}, not {head_size}"
    return None


def _check(problem: Problem) -> None:
    reason = unsupported_reason(problem.q.dtype, problem.q.shape[3])
    if reason is None and not (problem.q.is_cuda or interpreted()):
        reason = f"backend 'triton' takes tensors on a GPU, not on {problem.q.device}"
    if reason is not None:
        raise InputError(f"{reason}; use backend='auto'")
    if problem.k.shape[2] >= MOST_KEYS:
        raise InputError(
            f"backend 'triton' takes fewer than {MOST_KEYS} keys, not {problem.k.shape[2]}; use backend='blockwise'"
        )


def output(problem: Problem) -> Tensor:
    return forward(problem).out


def forward(problem: Problem) -> Forward:
    from traformer.ops.threshold_relative.triton.decode_kernels import decode, is_decode
    from traformer.ops.threshold_relative.triton.forward_kernel import forward as walk

    check_values(problem.log_decay, problem.threshold)
    _check(problem)
    return decode(problem) if is_decode(problem) else walk(problem)


def backward(problem: Problem, grad_out: Tensor, saved: Saved) -> Gradients:
    from traformer.ops.threshold_relative.triton.backward_kernels import backward as walk

    _check(problem)
    return walk(problem, grad_out, saved)
