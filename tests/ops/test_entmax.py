"""1.5-entmax against its exact solution by sorting, its gradient against finite differences."""

from __future__ import annotations

import pytest
import torch

from traformer.ops.entmax import entmax15


def by_sorting(logits):
    """Try every support size: tau solves sum of (z - tau)^2 over the k largest = 1."""
    halves = logits / 2
    ranked = halves.sort(descending=True).values
    for size in range(len(ranked), 0, -1):
        top = ranked[:size]
        under = 1 / size - (top.square().mean() - top.mean() ** 2)
        if under >= 0 and top.mean() - under.sqrt() < top[-1]:
            return (halves - (top.mean() - under.sqrt())).clamp(min=0).square()
    raise AssertionError("no support found")


@pytest.mark.parametrize("length", [1, 2, 7, 300, 4096])
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_values(length, spread, dtype):
    logits = torch.randn(5, length, dtype=torch.float64, generator=torch.Generator().manual_seed(length)) * spread
    got = entmax15(logits.to(dtype))
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    for row, expected in zip(got, map(by_sorting, logits), strict=True):
        torch.testing.assert_close(row.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(got.sum(-1), torch.ones(5, dtype=dtype))


def test_gradient():
    logits = torch.randn(3, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 2
    assert torch.autograd.gradcheck(entmax15, logits.requires_grad_())


def test_hidden_keys_and_empty_rows():
    logits = torch.tensor([[0.3, -torch.inf, 0.1], [-torch.inf] * 3], requires_grad=True)
    weights = entmax15(logits)
    assert weights[0, 1] == 0 and weights[1].eq(0).all()
    torch.testing.assert_close(weights[0, [0, 2]], entmax15(torch.tensor([0.3, 0.1])))
    weights.square().sum().backward()
    assert logits.grad.isfinite().all() and logits.grad[1].eq(0).all() and logits.grad[0, 1] == 0
