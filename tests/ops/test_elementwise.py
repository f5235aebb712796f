"""Thin dropout and the gated product against torch's own."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from traformer.ops import elementwise
from traformer.ops.elementwise import dropout, dropped_places, gated_silu


def test_places_are_sorted_within_and_repeatable() -> None:
    for count, p in [(1, 0.1), (10, 0.01), (100_000, 0.01), (777, 0.1)]:
        torch.manual_seed(3)
        places = dropped_places(count, p)
        torch.manual_seed(3)
        assert torch.equal(places, dropped_places(count, p))
        assert places.dtype == torch.int64
        assert ((places >= 0) & (places < count)).all() and (places.diff() > 0).all()


def test_every_place_is_dropped_with_probability_p_independently() -> None:
    torch.manual_seed(0)
    count, p, draws = 50, 0.1, 20_000
    dropped = torch.zeros(draws, count)
    for row in dropped:
        row[dropped_places(count, p)] = 1.0
    error = math.sqrt(p * (1 - p) / draws)
    assert ((dropped.mean(0) - p).abs() < 4.5 * error).all()
    pairs = (dropped[:, :-1] * dropped[:, 1:]).mean(0)  # neighbours
    assert ((pairs - p * p).abs() < 4.5 * math.sqrt(p * p * (1 - p * p) / draws)).all()
    totals = dropped.sum(1)
    assert totals.var().item() == pytest.approx(count * p * (1 - p), rel=0.06)


def test_draws_again_where_the_first_did_not_reach_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = torch.rand, []

    def small(count: int, dtype: torch.dtype) -> torch.Tensor:
        calls.append(count)
        return real(2, dtype=dtype)  # two gaps at a time

    monkeypatch.setattr(elementwise.torch, "rand", small)
    torch.manual_seed(0)
    places = dropped_places(1000, 0.1)
    assert len(calls) > 10 and len(places) > 50 and places.max() > 900


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5])
def test_dropout_scales_zeroes_and_sends_the_same_mask_back(p: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(30, 40, 5, dtype=torch.float64).transpose(0, 1).requires_grad_()
    out = dropout(x, p)
    kept = out != 0
    assert torch.allclose(out[kept], x[kept] / (1 - p)) and 0 < (~kept).sum() < x.numel()
    (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
    assert torch.allclose(grad, kept.double() / (1 - p))
    assert dropout(x, p, training=False) is x or torch.equal(dropout(x, p, training=False), x)


@pytest.mark.parametrize("shape", [(2, 3, 8), (1, 2), (5, 7, 126)])
def test_gated_product_and_its_gradient(shape: tuple[int, ...]) -> None:
    x = torch.randn(*shape, dtype=torch.float64, requires_grad=True)
    out = gated_silu(x)
    value, gate = x.chunk(2, -1)
    expected = value * F.silu(gate)
    assert torch.allclose(out, expected)
    grad = torch.randn_like(out)
    got, wanted = torch.autograd.grad(out, x, grad)[0], torch.autograd.grad(expected, x, grad)[0]
    assert torch.allclose(got, wanted, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        assert torch.allclose(gated_silu(x, 0.3, training=False), expected)


def test_gated_product_with_dropout_uses_one_mask_both_ways() -> None:
    torch.manual_seed(1)
    x = torch.randn(64, 200, dtype=torch.float64, requires_grad=True)
    out = gated_silu(x, 0.05)
    value, gate = x.chunk(2, -1)
    kept = out != 0
    assert 0.02 < (~kept).double().mean() < 0.09
    expected = value * F.silu(gate) * kept / 0.95
    assert torch.allclose(out, expected)
    grad = torch.randn_like(out)
    got, wanted = torch.autograd.grad(out, x, grad)[0], torch.autograd.grad(expected, x, grad)[0]
    assert torch.allclose(got, wanted, rtol=1e-12, atol=1e-12)
