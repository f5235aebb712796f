"""Which implementations there are, and which of them this machine can run. Backends never import one another."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar

import torch

from traformer.errors import InputError, unknown_name

BACKENDS = ("reference", "blockwise", "cpu", "triton")
_MODULES: dict[str, Any] = {}
_Function = TypeVar("_Function", bound=Callable[..., Any])


def fused_backend(name: str) -> Any:
    """The module of a fused backend: forward(problem) and backward(problem, grad_out, out, normaliser, reach)."""
    if name not in _MODULES:
        _MODULES[name] = import_module(f"traformer.ops.threshold_relative.{name}")
    return _MODULES[name]


def _constant(function: _Function) -> _Function:
    """torch.compiler.assume_constant_result, whose import of the compiler would take longer than all of ours."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_constant  # looks at files and the environment, which a traced graph cannot
def unavailable_reason(name: str) -> str | None:
    """None where the backend can run here, else why not."""
    if name in ("reference", "blockwise"):
        return None
    if name not in BACKENDS:
        raise unknown_name("backend", name, BACKENDS)
    if find_spec(f"traformer.ops.threshold_relative.{name}") is None:
        return f"backend {name!r} is not part of this version"
    return fused_backend(name).unavailable_reason()


@_constant
def unsupported_reason(name: str, dtype: torch.dtype, head_size: int) -> str | None:
    """None where a fused backend takes tensors of this type and head size, else why not."""
    return fused_backend(name).unsupported_reason(dtype, head_size)


def available_backends() -> list[str]:
    """Names that `backend=` takes on this machine, slowest first."""
    return [name for name in BACKENDS if unavailable_reason(name) is None]


def choose_backend(name: str, device: torch.device, dtype: torch.dtype, head_size: int) -> str:
    """What runs: an explicit name never falls back; 'auto' takes the fastest that gives the same result."""
    if name != "auto":
        reason = unavailable_reason(name)
        if reason is not None:
            raise InputError(f"{reason}; available: {', '.join(available_backends())}")
        return name
    fast = {"cpu": "cpu", "cuda": "triton"}.get(device.type)
    if fast is None or dtype == torch.float64 or unavailable_reason(fast) is not None:
        return "blockwise"
    if unsupported_reason(fast, dtype, head_size) is not None:
        return "blockwise"
    return fast
