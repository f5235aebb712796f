"""What torch may do with the operator besides one backward: second derivatives, torch.func, forward mode, in place."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.func import grad, hessian, jvp, vmap

from tests.ops.cases import FUSED, HERE, finest_dtype, make
from traformer.errors import InputError
from traformer.ops import threshold_relative_attention
from traformer.ops.threshold_relative.backends import BACKENDS

PLAIN = [name for name in HERE if not BACKENDS[name].fused]  # torch differentiates these itself


def inputs(dtype=torch.float64):
    return make(batch=2, heads=2, key_heads=1, queries=7, width=8, dtype=dtype)


def loss(q, k, v, g, **options):
    return threshold_relative_attention(q, k, v, g, **options).square().sum()


@pytest.mark.parametrize("backend", PLAIN)
def test_second_derivatives(backend):
    torch.autograd.gradgradcheck(lambda *x: threshold_relative_attention(*x, backend=backend), inputs())


@pytest.mark.parametrize("backend", FUSED)
def test_fused_backends_say_who_has_second_derivatives(backend):
    x = inputs(finest_dtype(backend))
    first = torch.autograd.grad(loss(*x, backend=backend), x, create_graph=True)
    with pytest.raises(InputError, match=f"backend '{backend}' has no second derivative; use backend='reference'"):
        sum(part.square().sum() for part in first).backward()


@pytest.mark.parametrize("backend", [*PLAIN, "auto"])
@pytest.mark.parametrize("options", [{}, {"surrogate_width": 0.5}, {"exclude_self": True, "threshold": 0.2}])
def test_func_transforms(backend, options):
    q, k, v, g = inputs()
    expected = torch.autograd.grad(loss(q, k, v, g, backend="reference", **options), (q, k, v, g))
    q, k, v, g = (x.detach() for x in (q, k, v, g))
    got = grad(lambda *x: loss(*x, backend=backend, **options), argnums=(0, 1, 2, 3))(q, k, v, g)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)
    # Gradients per example: vmap over the batch, which the operator still wants as a dimension of size 1.
    each = vmap(grad(lambda *x: loss(*(y[None] for y in x), backend=backend, **options), argnums=(0, 1, 2, 3)))
    for a, b in zip(each(q, k, v, g), expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("backend", [*PLAIN, "auto"])
def test_forward_mode(backend):
    q, k, v, g = (x.detach() for x in inputs())
    direction = torch.randn(q.shape, generator=torch.Generator().manual_seed(0), dtype=q.dtype)
    _, tangent = jvp(lambda q: loss(q, k, v, g, backend=backend), (q,), (direction,))
    torch.testing.assert_close(tangent, (grad(lambda q: loss(q, k, v, g, backend=backend))(q) * direction).sum())
    with forward_ad.dual_level():
        out = loss(forward_ad.make_dual(q, direction), k, v, g, backend=backend)
        torch.testing.assert_close(forward_ad.unpack_dual(out).tangent, tangent)
    small = [x[:1, :, :2] for x in (q, k, v, g)]
    curvature = hessian(lambda q: loss(q, *small[1:], backend=backend))(small[0])
    expected = torch.autograd.functional.hessian(lambda q: loss(q, *small[1:], backend="reference"), small[0])
    torch.testing.assert_close(curvature, expected)
    with pytest.raises(InputError, match=r"surrogate_width .* no forward-mode derivative"):
        jvp(lambda q: loss(q, k, v, g, backend=backend, surrogate_width=0.5), (q,), (direction,))


@pytest.mark.parametrize("backend", FUSED)
def test_fused_backends_say_who_takes_part_in_transforms(backend):
    q, k, v, g = (x.detach() for x in inputs(finest_dtype(backend)))
    for transform in (grad, vmap, lambda f: lambda q: jvp(f, (q,), (q,))):
        with pytest.raises(InputError, match=f"backend '{backend}' takes no part in torch.func transforms"):
            transform(lambda q: loss(q.expand(2, 2, 7, 8), k, v, g, backend=backend))(q)


@pytest.mark.parametrize("backend", HERE)
def test_the_result_may_be_changed_in_place(backend):
    x = [y.detach() for y in inputs(finest_dtype(backend))]
    expected = threshold_relative_attention(*x, backend=backend) * 2
    assert torch.equal(threshold_relative_attention(*x, backend=backend).mul_(2), expected)
    x[0].requires_grad_()
    out = threshold_relative_attention(*x, backend=backend)
    assert torch.equal(out.mul_(2).detach(), expected)
    if BACKENDS[backend].fused:
        # It keeps its result for the gradient, and torch notices the change: the same as in torch's own attention.
        own = F.scaled_dot_product_attention(x[0], *(y.repeat_interleave(2, 1) for y in x[1:3]), is_causal=True)
        for changed in (out, own.mul_(2)):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                changed.sum().backward()
    else:
        out.sum().backward()
        assert x[0].grad is not None


@pytest.mark.parametrize("backend", [name for name in FUSED if finest_dtype(name) != torch.float64])
def test_double_precision_is_refused_with_the_way_out(backend):
    with pytest.raises(InputError, match=r"not float64; use backend='blockwise', 'reference' or 'auto'"):
        threshold_relative_attention(*inputs(), backend=backend)
