"""Blocks of queries change nothing but memory; the bias as a channel of the key; T5's buckets."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from traformer import query_blocks
from traformer.ops import eager
from traformer.ops.alibi import with_key_bias
from traformer.ops.cope import cope_attention
from traformer.ops.entmax import entmax_attention
from traformer.ops.stick_breaking import stick_breaking_attention
from traformer.ops.t5 import t5_buckets
from traformer.ops.threshold_variants import threshold_variant_attention


def tensors(dtype=torch.float64, length=23, keys=29):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, length, 8, dtype=dtype, generator=generator)
    k, v = (torch.randn(2, 2, keys, 8, dtype=dtype, generator=generator) for _ in range(2))
    return q, k, v


ATTENTIONS = {
    "cope": lambda q, k, v, visible, extra, **more: cope_attention(q, k, v, extra[:, :8], visible, **more),
    "entmax": lambda q, k, v, visible, extra, **more: entmax_attention(
        q, k, v, extra[None, :4, :29], extra[None, :4, 6:29], visible, **more
    ),
    "stick_breaking": lambda q, k, v, visible, extra, **more: stick_breaking_attention(q, k, v, visible, **more),
    "stick_breaking_self": lambda q, k, v, visible, extra, **more: stick_breaking_attention(
        q, k, v, visible, remainder_to_self=True, **more
    ),
    "variant": lambda q, k, v, visible, extra, **more: threshold_variant_attention(
        q, k, v, visible, extra[None, :4, :23].abs(), log_decay=-extra[None, 4:8, :23].abs().expand(2, -1, -1), **more
    ),
}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_blocks_equal_the_whole(name, monkeypatch):
    """Queries stand at 6 .. 28 of 29 keys, some of which are padded; outputs and all gradients agree."""
    q, k, v = (x.requires_grad_() for x in tensors())
    extra = torch.randn(16, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    visible = torch.arange(29) <= (torch.arange(23) + 6)[:, None]
    visible = visible[None, None] & (torch.rand(2, 1, 1, 29, generator=torch.Generator().manual_seed(2)) > 0.2)
    results = []
    for block in (512, 5):
        monkeypatch.setattr(query_blocks, "QUERY_BLOCK", block)
        out, weights = ATTENTIONS[name](q, k, v, visible, extra, scale=0.3, query_start=6)
        assert weights is None
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v, extra), allow_unused=True)))
    for a, b in zip(*results, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)
    out, weights = ATTENTIONS[name](q, k, v, visible, extra, scale=0.3, query_start=6, need_weights=True)
    torch.testing.assert_close(out, results[0][0])
    torch.testing.assert_close(weights @ v.repeat_interleave(2, 1), out)
    assert (weights * ~visible).eq(0).all()


@pytest.mark.parametrize("name", ATTENTIONS)
def test_small_blocks_on_a_cpu_equal_the_whole(name, monkeypatch):
    """A block has no more scores than CPU_BLOCK_ENTRIES; up to QUERY_BLOCK queries nothing is computed twice."""
    q, k, v = (x.requires_grad_() for x in tensors())
    extra = torch.randn(16, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    visible = (torch.arange(29) <= (torch.arange(23) + 6)[:, None])[None, None]

    def results() -> tuple[torch.Tensor | None, ...]:
        out, _ = ATTENTIONS[name](q, k, v, visible, extra, scale=0.3, query_start=6)
        return (out, *torch.autograd.grad(out.square().sum(), (q, k, v, extra), allow_unused=True))

    expected = results()
    monkeypatch.setattr(query_blocks, "SHORTEST_BLOCK", 3)
    monkeypatch.setattr(query_blocks, "CPU_BLOCK_ENTRIES", 7 * 2 * 4 * 29)  # seven queries of 2 x 4 heads with 29 keys
    assert eager.queries_at_once(q, k) == 7
    monkeypatch.setattr(eager, "checkpoint", None)
    for found, wanted in zip(results(), expected, strict=True):
        torch.testing.assert_close(found, wanted)
    with torch.no_grad():
        out, _ = ATTENTIONS[name](q, k, v, visible, extra, scale=0.3, query_start=6)
    torch.testing.assert_close(out, expected[0])


def test_the_length_of_a_block(monkeypatch):
    """As many queries as CPU_BLOCK_ENTRIES scores allow, from SHORTEST_BLOCK to QUERY_BLOCK; elsewhere QUERY_BLOCK."""
    q = torch.zeros(8, 4, 512, 1)
    assert eager.queries_at_once(q, q) == query_blocks.CPU_BLOCK_ENTRIES // (8 * 4 * 512) == 64
    assert eager.queries_at_once(q[:1, :1, :8], q[:1, :1, :8]) == query_blocks.QUERY_BLOCK
    assert eager.queries_at_once(q, q.repeat(1, 1, 64, 1)) == query_blocks.SHORTEST_BLOCK
    assert eager.queries_at_once(q.to("meta"), q) == query_blocks.QUERY_BLOCK
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert eager.queries_at_once(q, q) == query_blocks.QUERY_BLOCK


def test_the_remainder_goes_to_the_own_value():
    q, k, v = tensors(length=6, keys=6)
    visible = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
    _, plain = stick_breaking_attention(q, k, v, visible, scale=0.3, need_weights=True)
    _, whole = stick_breaking_attention(q, k, v, visible, scale=0.3, need_weights=True, remainder_to_self=True)
    assert plain is not None and whole is not None
    assert plain.diagonal(dim1=-2, dim2=-1).eq(0).all() and (plain.sum(-1) < 1).all()
    torch.testing.assert_close(whole.sum(-1), torch.ones(2, 4, 6, dtype=torch.float64))
    torch.testing.assert_close(whole.tril(-1), plain)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_bias_as_a_channel_of_the_key(dtype):
    """Also where the bias needs more digits than the type has: thousands, with steps of 0.01."""
    q, k, v = tensors(dtype, keys=23)
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    steps = torch.arange(23, dtype=torch.float32) * torch.arange(1, 5)[:, None]  # [H, Tk]
    bias = (3000.0 + 0.01 * steps.double())[None]
    length = q.shape[2]
    inputs = with_key_bias(q, k, v, bias, bias[..., :length], 0.25)
    out = F.scaled_dot_product_attention(*inputs, is_causal=True, scale=1.0)[..., :8]
    logits = (q * 0.25).double() @ k.double().transpose(-1, -2) + bias[:, :, None].double()
    hidden = torch.ones(23, 23, dtype=torch.bool).triu(1)
    expected = logits.masked_fill(hidden, -math.inf).softmax(-1) @ v.double()
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 4e-2}[dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


def test_t5_buckets():
    distances = torch.arange(-3, 400)
    got = t5_buckets(distances, 32, 128).tolist()
    for distance, bucket in zip(distances.tolist(), got, strict=True):
        if distance < 16:
            assert bucket == max(0, distance)
        else:
            assert bucket == min(31, 16 + int(math.log(distance / 16) / math.log(8) * 16))
    assert got == sorted(got) and got[-1] == 31
