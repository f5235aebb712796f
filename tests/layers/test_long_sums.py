"""Distances that are differences of running sums: thousands of keys on, fp32 still equals fp64 in every row."""

from __future__ import annotations

import copy

import pytest
import torch

from traformer.layers import layer_class
from traformer.layers.cache import KeyValueCache
from traformer.ops.entmax import entmax_attention
from traformer.ops.threshold_variants import threshold_variant_attention

LENGTH = 4096
SUM = 3000.0  # what the gates have added up to before the first key: as after many more keys


def layer(name, **options):
    torch.manual_seed(0)
    made = layer_class(name)(32, 2, **options)
    if name == "fot":
        made.forget_proj.bias.data.fill_(-1.0)  # a token forgets 1.3, so that the sum is large and near keys decide
    return made


def worst_row(got, wanted):
    return (got.double() - wanted).abs().amax(-1).div(wanted.square().mean().sqrt())


@pytest.mark.parametrize(
    ("name", "options"),
    [("alibi", {}), ("fot", {}), ("fot", {"tolerance": 0.0}), ("fot", {"tolerance": 0.0, "sliding_window": 700})],
)
def test_every_row_and_gradient(name, options):
    single = layer(name, **options)
    double = copy.deepcopy(single).double()
    x = torch.randn(1, LENGTH, 32)
    wide = x.double().requires_grad_()
    x.requires_grad_()
    got, wanted = single(x), double(wide)
    assert worst_row(got, wanted).max() < 1e-5
    weights = torch.randn(got.shape)
    (got * weights).sum().backward()
    (wanted * weights.double()).sum().backward()
    assert worst_row(x.grad, wide.grad).max() < 2e-5
    for one, other in zip(single.parameters(), double.parameters(), strict=True):
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=0, atol=1e-3 * float(other.grad.abs().max()))


@pytest.mark.parametrize("name", ["alibi", "fot"])
def test_a_cache_packing_and_padding(name):
    single = layer(name)
    double = copy.deepcopy(single).double()
    x = torch.randn(1, LENGTH, 32)
    with torch.no_grad():
        wanted = double(x.double())
        cache, parts = KeyValueCache(), []
        for part in x.split([LENGTH - 200, 197, 1, 1, 1], dim=1):
            parts.append(single(part, cache=cache))
        assert worst_row(torch.cat(parts, 1), wanted).max() < 1e-5
        packed = single(torch.cat((x, x), 1), cu_seqlens=torch.tensor([0, LENGTH, 2 * LENGTH]))
        assert worst_row(packed[:, LENGTH:], wanted).max() < 1e-5
        real = torch.ones(1, LENGTH + 3, dtype=torch.bool)
        real[:, :3] = False
        padded = single(torch.cat((x[:, :3], x), 1), key_padding_mask=real)
        assert worst_row(padded[:, 3:], wanted).max() < 1e-5


@pytest.mark.parametrize("name", ["alibi", "fot"])
def test_a_later_token_that_is_not_finite_leaves_earlier_rows_alone(name):
    made = layer(name, tolerance=0.0) if name == "fot" else layer(name)
    x = torch.randn(1, 600, 32)
    broken = x.clone()
    broken[:, -1] = torch.nan
    before = slice(0, 256)  # torch's kernel multiplies values of later keys in the same block by 0
    assert worst_row(made(broken)[:, before], made(x)[:, before].double()).max() < 1e-6


@pytest.mark.parametrize("method", ["entmax", "threshold"])
def test_eager_methods(method):
    """Scores are whole quarters, which fp32 adds exactly, so that both types keep the same keys."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randint(-2, 3, (1, 2, 500, 4), generator=generator).float() for _ in range(2))
    v = torch.randn(1, 2, 500, 4, generator=generator)
    bias = SUM + 0.3 * torch.rand(1, 2, 500, dtype=torch.float64, generator=generator).cumsum(-1)
    visible = torch.ones(500, 500, dtype=torch.bool).tril()[None, None]
    threshold = torch.full((1, 1, 500), 0.1)

    def run(q, k, v, bias):
        if method == "entmax":
            return entmax_attention(q, k, v, bias, bias, visible, scale=0.25)[0]
        return threshold_variant_attention(
            q, k, v, visible, threshold.to(q.dtype), key_bias=bias, query_bias=bias, scale=0.25
        )[0]

    got, wanted = run(q, k, v, bias), run(q.double(), k.double(), v.double(), bias)
    assert worst_row(got, wanted).max() < 1e-5
