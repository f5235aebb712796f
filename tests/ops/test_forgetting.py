"""Pruned forgetting attention against the formula in float64: it drops keys, but no more than its tolerance."""

from __future__ import annotations

import math

import pytest
import torch

from traformer.ops.forgetting import PRUNING_BLOCK, leftmost_keys, pruned_forgetting_attention

LENGTH, D = 2 * PRUNING_BLOCK + 77, 8


def inputs(rate):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, LENGTH, D, dtype=torch.float64, generator=generator) for _ in range(3))
    q, k = (x / x.square().mean(-1, keepdim=True).sqrt() for x in (q, k))
    gates = -torch.rand(2, 2, LENGTH, dtype=torch.float64, generator=generator) * torch.tensor(rate)[:, None]
    return q, k, v, gates.cumsum(-1)


def formula(q, k, v, cumulative):
    logits = q @ k.transpose(-1, -2) / math.sqrt(D) + cumulative[..., :, None] - cumulative[..., None, :]
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    return logits.masked_fill(hidden, -math.inf).softmax(-1) @ v


@pytest.mark.parametrize("tolerance", [2.0**-24, 1e-3])
def test_drops_at_most_the_tolerance(tolerance):
    tensors = [x.requires_grad_() for x in inputs([0.5, 0.001])]
    q, k, v, cumulative = tensors
    leftmost = leftmost_keys(cumulative.detach(), math.sqrt(D), tolerance)
    assert leftmost[0][-1] > LENGTH / 2 and leftmost[1] == [0, 0, 0]  # the fast head reads little, the slow one all
    out = pruned_forgetting_attention(q, k, v, cumulative, leftmost, 1 / math.sqrt(D))
    expected = formula(q, k, v, cumulative)
    assert (out - expected).abs().max() <= 2 * tolerance * v.abs().max()
    weights = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    got = torch.autograd.grad((out * weights).sum(), tensors)
    wanted = torch.autograd.grad((expected * weights).sum(), tensors)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e4 * tolerance)


def test_without_forgetting_nothing_is_pruned():
    cumulative = inputs([0.0, 0.0])[3]
    assert leftmost_keys(cumulative, math.sqrt(D), 2.0**-24) == [[0, 0, 0], [0, 0, 0]]
