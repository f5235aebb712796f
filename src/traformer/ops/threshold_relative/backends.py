"""Which implementations there are, and which of them this machine can run. Backends never import one another.

To add one, write a module beside this file that follows `FusedBackend` and add its entry to BACKENDS.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from traformer.errors import InputError, unknown_name
from traformer.ops.threshold_relative.problem import Forward, Gradients, Problem, Saved


class FusedBackend(Protocol):
    """What the module of a fused backend provides."""

    def unavailable_reason(self) -> str | None:
        """None where the backend can run on this machine, else one clause that says why not."""

    def unsupported_reason(self, dtype: torch.dtype, head_size: int) -> str | None:
        """None where it takes tensors of this type and head size, else one clause that says why not."""

    def forward(self, problem: Problem) -> Forward:
        """Also refuses values that no problem may have, see `options.check_values`."""

    def output(self, problem: Problem) -> Tensor:
        """`forward(problem).out` alone, for a call that no backward follows."""

    def backward(self, problem: Problem, grad_out: Tensor, saved: Saved) -> Gradients: ...


@dataclass(frozen=True)
class Backend:
    """An entry of the registry."""

    name: str  # of the module too
    fused: bool  # follows FusedBackend: an early exit, a backward of its own; else plain differentiable torch
    device: str | None  # the kind of device that it is the fast choice for; None: runs anywhere
    dtypes: tuple[torch.dtype, ...]


_SINGLE = (torch.float32, torch.bfloat16, torch.float16)
# Slowest first.
BACKENDS = {
    entry.name: entry
    for entry in (
        Backend("reference", fused=False, device=None, dtypes=(torch.float64, *_SINGLE)),
        Backend("blockwise", fused=True, device=None, dtypes=(torch.float64, *_SINGLE)),
        Backend("cpu", fused=True, device="cpu", dtypes=_SINGLE),
        Backend("triton", fused=True, device="cuda", dtypes=_SINGLE),
    )
}
_MODULES: dict[str, FusedBackend] = {}
_Function = TypeVar("_Function", bound=Callable[..., Any])


def fused_backend(name: str) -> FusedBackend:
    """The module of a fused backend, loaded when it is first asked for."""
    if name not in _MODULES:
        _MODULES[name] = cast(FusedBackend, import_module(f"traformer.ops.threshold_relative.{name}"))
    return _MODULES[name]


def _constant(function: _Function) -> _Function:
    """torch.compiler.assume_constant_result, whose import of the compiler would take longer than all of ours."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_constant  # looks at files and the environment, which a traced graph cannot
def unavailable_reason(name: str) -> str | None:
    """None where the backend can run here, else why not."""
    if name not in BACKENDS:
        raise unknown_name("backend", name, BACKENDS)
    if not BACKENDS[name].fused:
        return None
    return fused_backend(name).unavailable_reason()


@_constant
def unsupported_reason(name: str, dtype: torch.dtype, head_size: int) -> str | None:
    """None where the backend takes tensors of this type and head size, else why not."""
    return fused_backend(name).unsupported_reason(dtype, head_size) if BACKENDS[name].fused else None


def available_backends() -> list[str]:
    """Names that `backend=` takes on this machine, slowest first."""
    return [name for name in BACKENDS if unavailable_reason(name) is None]


def choose_backend(name: str, device: torch.device, dtype: torch.dtype, head_size: int) -> str:
    """What runs: an explicit name never falls back; 'auto' takes the fastest that gives the same result."""
    if name == "auto":
        for entry in reversed(BACKENDS.values()):
            fits = entry.fused and entry.device in (None, device.type) and dtype in entry.dtypes
            available = fits and unavailable_reason(entry.name) is None
            if not fits or (not available and entry.name != "cpu"):
                continue
            if unsupported_reason(entry.name, dtype, head_size) is not None:
                continue
            if available:
                return entry.name
            _pass_over_cpu()
        raise InputError(f"no backend takes {dtype} with head size {head_size} on {device}")
    reason = unavailable_reason(name)
    if reason is not None:
        raise InputError(f"{reason}; available: {', '.join(available_backends())}")
    reason = unsupported_reason(name, dtype, head_size)
    if reason is not None:
        raise InputError(f"{reason}; use backend='blockwise', 'reference' or 'auto'")
    return name


@_constant
def _pass_over_cpu() -> None:
    """An error where an environment variable asks for what cannot be had; else the slower path is noted once."""
    from traformer.ops.threshold_relative import cpu

    cpu.refuse_bad_environment()
    cpu.note_missing_kernel()
