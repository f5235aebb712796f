"""The reference against loops written from the formula, and against finite differences."""

import math

import pytest
import torch

from tests.ops.cases import DOUBLE, LENGTHS, make
from traformer.ops import attention_map, threshold_relative_attention


def naive(q, k, v, log_decay, threshold=0.0, exclude_self=False, first=None, real=None):
    """One number at a time, straight from the definition."""
    batch, heads, length, width = q.shape
    group = heads // k.shape[1]
    offset = k.shape[2] - length
    out = torch.zeros_like(q)
    for b in range(batch):
        for h in range(heads):
            for i in range(length):
                kept, logits = 0, []
                for j in range(offset + i, -1 if first is None else int(first[i]) - 1, -1):
                    if (real is not None and not real[b, j]) or (exclude_self and j == offset + i):
                        continue
                    score = float(q[b, h, i] @ k[b, h // group, j]) / math.sqrt(width)
                    if score > threshold:
                        kept += 1
                        logits.append((j, score + float(log_decay[b, h, i]) * kept))
                if logits:
                    peak = max(x for _, x in logits)
                    total = sum(math.exp(x - peak) for _, x in logits)
                    for j, x in logits:
                        out[b, h, i] += math.exp(x - peak) / total * v[b, h // group, j]
    return out


@pytest.mark.parametrize("length", LENGTHS[:-1])
def test_equals_the_definition(length):
    q, k, v, g = (x.detach() for x in make(queries=length))
    torch.testing.assert_close(
        threshold_relative_attention(q, k, v, g, backend="reference"), naive(q, k, v, g), rtol=1e-12, atol=1e-12
    )


def test_equals_the_definition_with_every_option():
    q, k, v, g = (x.detach() for x in make(batch=1, queries=9, keys=21))
    real = torch.rand(1, 21, generator=torch.Generator().manual_seed(3)) > 0.3
    ends = torch.tensor([0, 14, 21])
    first = [0, 0, 14, 14, 14, 14, 14, 14, 14]  # queries stand at 12..20
    got = threshold_relative_attention(
        q, k, v, g, threshold=0.3, exclude_self=True, key_padding_mask=real, cu_seqlens=ends, backend="reference"
    )
    torch.testing.assert_close(got, naive(q, k, v, g, 0.3, True, first, real), rtol=1e-12, atol=1e-12)


def test_gradients_by_finite_differences():
    inputs = make(batch=1, heads=2, key_heads=1, queries=9, width=8)
    for backend in DOUBLE:
        torch.autograd.gradcheck(
            lambda *x, b=backend: threshold_relative_attention(*x, backend=b, tolerance=0.0), inputs
        )
        torch.autograd.gradcheck(
            lambda *x, b=backend: threshold_relative_attention(
                *x, backend=b, tolerance=0.0, dropout_p=0.3, dropout_seed=3, threshold=0.1, exclude_self=True
            ),
            inputs,
        )


def test_map_is_consistent():
    q, k, v, g = (x.detach() for x in make(queries=40))
    scores, keep, distance, weights = attention_map(q, k, g)
    assert keep.dtype == torch.bool and not keep.triu(1).any()
    assert torch.equal(keep, (scores > 0).tril())
    # The nearest kept key has distance 1; counts rise by one from right to left over kept keys.
    expected = keep.flip(-1).cumsum(-1).flip(-1) * keep
    assert torch.equal(distance, expected)
    rows = keep.any(-1)
    torch.testing.assert_close(weights.sum(-1), rows.double())
    out = weights @ v.repeat_interleave(2, dim=1)
    torch.testing.assert_close(out, threshold_relative_attention(q, k, v, g, backend="reference"))
