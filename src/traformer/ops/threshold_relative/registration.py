"""torch.library registration: one operator forward, one backward; compile, export and autograd see one node each.

Both take a backend's name and the fields of a Problem in order; nothing here names a field that it does not treat.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._ops import _len_torch_dispatch_stack_pre_dispatch

from traformer.errors import InputError
from traformer.ops.threshold_relative.backends import fused_backend
from traformer.ops.threshold_relative.problem import (
    SCHEMA,
    Forward,
    Gradients,
    Problem,
    Saved,
    Value,
    empty_forward,
    empty_gradients,
)

_PLAIN_TYPES = frozenset((Tensor, torch.nn.Parameter, float, int, bool, type(None)))  # of a Problem's fields


@torch.library.custom_op(
    "traformer::threshold_relative_attention",
    mutates_args=(),
    schema=f"(str backend, {SCHEMA}) -> (Tensor out, Tensor normaliser, Tensor reach, Tensor kept)",
)
def forward_op(backend: str, *values: Value) -> Forward:
    return fused_backend(backend).forward(Problem._make(values))


def run_forward(backend: str, problem: Problem) -> Forward:
    """The registered operator's result.

    Where torch would only pass the call on, its dispatcher is left out: it takes longer than a short decode.
    """
    if _torch_takes_part(problem):
        return Forward(*forward_op(backend, *problem))
    return fused_backend(backend).forward(problem)


def run_output(backend: str, problem: Problem) -> Tensor:
    """`run_forward(...).out`, and nothing that only a backward or `attention_stats` would read."""
    if _torch_takes_part(problem):
        return Forward(*forward_op(backend, *problem)).out
    return fused_backend(backend).output(problem)


def _torch_takes_part(problem: Problem) -> bool:
    """Whether autograd, a trace, a mode, a transform, a profiler or a tensor's own type may have a say in the call."""
    if torch.compiler.is_compiling() or problem.needs_grad or problem.q.device.type != "cpu":
        return True
    if (
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
        or torch.autograd._profiler_enabled()
        or _len_torch_dispatch_stack_pre_dispatch()
    ):
        return True
    return not all(map(_PLAIN_TYPES.__contains__, map(type, problem)))


@forward_op.register_fake
def _(backend: str, *values: Value) -> Forward:
    return empty_forward(Problem._make(values))


@torch.library.custom_op(
    "traformer::threshold_relative_attention_backward",
    mutates_args=(),
    schema=f"(str backend, Tensor grad_out, Tensor out, Tensor normaliser, Tensor reach, {SCHEMA}) -> "
    "(Tensor q, Tensor k, Tensor v, Tensor log_decay, Tensor threshold)",
)
def backward_op(
    backend: str, grad_out: Tensor, out: Tensor, normaliser: Tensor, reach: Tensor, *values: Value
) -> Gradients:
    return fused_backend(backend).backward(Problem._make(values), grad_out, Saved(out, normaliser, reach))


@backward_op.register_fake
def _(backend: str, grad_out: Tensor, out: Tensor, normaliser: Tensor, reach: Tensor, *values: Value) -> Gradients:
    return empty_gradients(Problem._make(values))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.backend = inputs[0]
    values = Problem._make(inputs[1:]).for_backward()
    saved = Saved(*output[:3])
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*saved, *(x if isinstance(x, Tensor) else None for x in values))
    ctx.others = [None if isinstance(x, Tensor) else x for x in values]


def _backward(ctx: Any, grad_out: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    saved = Saved(*tensors[:3])
    values = [other if x is None else x for x, other in zip(tensors[3:], ctx.others, strict=True)]
    gradients = Gradients(*backward_op(ctx.backend, grad_out, *saved, *values))._asdict()
    problem = Problem._make(values)
    if problem.threshold is None or not problem.surrogate_width:
        gradients["threshold"] = None
    return (None, *(gradients.get(name) for name in Problem._fields))


def _no_second_derivative(ctx: Any, *_: Any) -> NoReturn:
    raise InputError(
        f"backend {ctx.backend!r} has no second derivative; use backend='reference', which torch differentiates itself"
    )


def _remember_backend(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.backend = inputs[0]


forward_op.register_autograd(_backward, setup_context=_save)
backward_op.register_autograd(_no_second_derivative, setup_context=_remember_backend)
