"""RMS normalisation against its formula, in fp64 and in half precision."""

from __future__ import annotations

import pytest
import torch

from traformer.layers import RMSNorm, rms_norm


def formula(x, weight=None, eps=1e-6):
    out = x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return out if weight is None else out * weight


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 1, 3, 64)])
def test_value_and_gradients(shape, scaled):
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(shape[-1], dtype=torch.float64, requires_grad=True) if scaled else None
    inputs = (x, weight) if scaled else (x,)
    torch.testing.assert_close(rms_norm(*inputs), formula(*inputs), rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(rms_norm, inputs)


def test_zero_rows_are_zero_with_finite_gradient():
    x = torch.zeros(2, 4, requires_grad=True)
    out = rms_norm(x)
    out.sum().backward()
    assert out.eq(0).all() and x.grad.isfinite().all()


def test_a_frozen_scale_gets_no_gradient():
    norm = RMSNorm(4)
    norm.weight.requires_grad_(False)
    x = torch.randn(3, 4, requires_grad=True)
    norm(x).sum().backward()
    assert norm.weight.grad is None and x.grad is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_once(dtype):
    torch.manual_seed(0)
    x = torch.randn(5, 64).to(dtype)
    assert rms_norm(x).dtype == dtype
    assert torch.equal(rms_norm(x), rms_norm(x.float()).to(dtype))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(rms_norm(x.float()), rms_norm(x.float()))


def test_one_graph_under_compile():
    x = torch.randn(3, 8, requires_grad=True)
    weight = torch.randn(8, requires_grad=True)
    compiled = torch.compile(lambda x, w: rms_norm(rms_norm(x), w), fullgraph=True, backend="aot_eager")
    compiled(x, weight).pow(2).sum().backward()
    grads = x.grad.clone(), weight.grad.clone()
    x.grad = weight.grad = None
    rms_norm(rms_norm(x), weight).pow(2).sum().backward()
    torch.testing.assert_close(grads, (x.grad, weight.grad))


@pytest.mark.parametrize("scaled", [False, True])
def test_the_same_bits_with_and_without_gradients(scaled):
    torch.manual_seed(0)
    x, weight = torch.randn(9, 64, requires_grad=True), torch.randn(64) if scaled else None
    with torch.no_grad():
        plain = rms_norm(x, weight)
    assert torch.equal(plain, rms_norm(x, weight))
