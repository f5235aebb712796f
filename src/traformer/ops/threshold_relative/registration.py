"""torch.library registration: one operator forward, one backward; compile, export and autograd see one node each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from traformer.errors import InputError
from traformer.ops.threshold_relative.backends import fused_backend
from traformer.ops.threshold_relative.problem import Problem, backward_outputs, forward_outputs


def check_values(log_decay: Tensor, threshold: Tensor | None) -> None:
    """Checks that need the values themselves. Skipped off the CPU, where looking would wait for the device."""
    if log_decay.device.type != "cpu":
        return
    if bool((log_decay > 0).any()):
        raise InputError("log_decay must be <= 0 everywhere (it is the log of a decay, e.g. logsigmoid of a gate)")
    if threshold is not None and bool((threshold < 0).any()):
        raise InputError("threshold must be >= 0 everywhere")


@torch.library.custom_op("traformer::threshold_relative_attention", mutates_args=())
def forward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    threshold: Tensor | None,
    threshold_value: float,
    exclude_self: Tensor | None,
    key_padding_mask: Tensor | None,
    first_key: Tensor | None,
    query_start: int,
    scale: float,
    score_bound: Tensor | None,
    dropout_p: float,
    dropout_seed: Tensor | None,
    tolerance: float,
    needs_grad: bool,
    key_low: Tensor | None,
    key_high: Tensor | None,
    key_norm: Tensor | None,
    surrogate_width: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, normaliser, reach, kept."""
    problem = Problem(
        q, k, v, log_decay, threshold, threshold_value, exclude_self, key_padding_mask, first_key, query_start, scale,
        score_bound, dropout_p, dropout_seed, tolerance, needs_grad, key_low, key_high, key_norm, surrogate_width,
    )  # fmt: skip
    check_values(log_decay, threshold)
    return fused_backend(backend).forward(problem)


@forward_op.register_fake
def _(q: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return forward_outputs(q)


@torch.library.custom_op("traformer::threshold_relative_attention_backward", mutates_args=())
def backward_op(
    grad_out: Tensor,
    out: Tensor,
    normaliser: Tensor,
    reach: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    threshold: Tensor | None,
    threshold_value: float,
    exclude_self: Tensor | None,
    key_padding_mask: Tensor | None,
    first_key: Tensor | None,
    query_start: int,
    scale: float,
    dropout_p: float,
    dropout_seed: Tensor | None,
    surrogate_width: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, dlog_decay, dthreshold. The walk ends where the forward's did (reach): no bound, no tolerance."""
    problem = Problem(
        q, k, v, log_decay, threshold, threshold_value, exclude_self, key_padding_mask, first_key, query_start, scale,
        None, dropout_p, dropout_seed, 0.0, True, surrogate_width=surrogate_width,
    )  # fmt: skip
    return fused_backend(backend).backward(problem, grad_out, out, normaliser, reach)


@backward_op.register_fake
def _(
    grad_out: Tensor, out: Tensor, normaliser: Tensor, reach: Tensor, q: Tensor, k: Tensor, v: Tensor,
    log_decay: Tensor, *args: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return backward_outputs(q, k, log_decay, surrogate_width=args[-2])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    (q, k, v, log_decay, threshold, ctx.threshold_value, exclude_self, key_padding_mask, first_key, ctx.query_start,
     ctx.scale, _, ctx.dropout_p, dropout_seed, _, _, _, _, _, ctx.surrogate_width, ctx.backend) = inputs  # fmt: skip
    out, normaliser, reach, _ = output
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(
        out, normaliser, reach, q, k, v, log_decay, threshold, exclude_self, key_padding_mask, first_key, dropout_seed
    )


def _backward(ctx: Any, grad_out: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    (out, normaliser, reach, q, k, v, log_decay, threshold, exclude_self, key_padding_mask, first_key,
     dropout_seed) = ctx.saved_tensors  # fmt: skip
    dq, dk, dv, dlog_decay, dthreshold = backward_op(
        grad_out, out, normaliser, reach, q, k, v, log_decay, threshold, ctx.threshold_value, exclude_self,
        key_padding_mask, first_key, ctx.query_start, ctx.scale, ctx.dropout_p, dropout_seed,
        ctx.surrogate_width, ctx.backend,
    )  # fmt: skip
    has_threshold = threshold is not None and ctx.surrogate_width > 0.0
    return (dq, dk, dv, dlog_decay, dthreshold if has_threshold else None, *[None] * 16)


forward_op.register_autograd(_backward, setup_context=_save)
