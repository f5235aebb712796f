"""Balls around keys: what they prove is true, and where it can be proven they prove it."""

from __future__ import annotations

import pytest
import torch

from traformer.ops import attention_map
from traformer.ops.threshold_relative import key_balls
from traformer.ops.threshold_relative.key_balls import KeyBalls


def few_kinds(batch: int, heads: int, length: int, width: int, kinds: int, noise: float, seed: int = 0) -> torch.Tensor:
    """Keys that are one of a few vectors, with noise."""
    torch.manual_seed(seed)
    vectors = torch.randn(batch, heads, kinds, width)
    which = torch.randint(kinds, (batch, heads, length))
    return vectors.gather(2, which[..., None].expand(-1, -1, -1, width)) + noise * torch.randn(
        batch, heads, length, width
    )


def truly_empty(q: torch.Tensor, k: torch.Tensor, threshold) -> torch.Tensor:
    """[B, Hq, T]: no key at all scores above the threshold, by the canonical decision."""
    queries = q.shape[2]
    pad = torch.zeros_like(k[:, :, :1]).expand(-1, -1, queries, -1)  # so that every query sees every key of k
    keep = attention_map(q, torch.cat((k, pad), 2), -torch.ones(q.shape[:3]), threshold=threshold).keep
    return ~keep[..., : k.shape[2]].any(-1)


@pytest.mark.parametrize("kinds", [1, 5, 40, 500])
@pytest.mark.parametrize("noise", [0.0, 1e-6, 0.05, 1.0])
def test_what_is_proven_is_true(kinds, noise):
    q, k = torch.randn(2, 4, 200, 16), few_kinds(2, 2, 300, 16, kinds, noise)
    threshold = 2.0  # so that there are rows of either sort
    balls = KeyBalls()
    for piece in k.split(70, dim=2):
        balls.append(piece)
    proven = balls.keeps_nothing(q, 0.25, threshold)
    empty = truly_empty(q, k, threshold)
    assert not (proven & ~empty).any()
    if kinds <= 40 and noise <= 1e-6:  # every kind has a ball of its own: nothing is missed but what lies on the edge
        assert proven.sum() >= empty.sum() - 2 and empty.any()


def test_scores_at_the_threshold_are_not_proven_above_it():
    """Queries built to score next to the threshold, on either side: a wrong proof would show here first."""
    torch.manual_seed(3)
    k = few_kinds(1, 1, 64, 8, 3, 0.0)
    q = torch.randn(1, 1, 4096, 8)
    normal = k[0, 0, 0] / k[0, 0, 0].norm()
    q = q - (q @ normal)[..., None] * normal  # orthogonal to one kind, up to rounding
    q = q + torch.linspace(-3e-7, 3e-7, 4096)[:, None] * normal
    balls = KeyBalls()
    balls.append(k)
    assert not (balls.keeps_nothing(q, 8**-0.5, 0.0) & ~truly_empty(q, k, 0.0)).any()


def test_thresholds_of_their_own():
    q, k = torch.randn(1, 2, 50, 8), few_kinds(1, 2, 100, 8, 4, 0.0)
    threshold = torch.rand(1, 2, 50) * 3
    balls = KeyBalls()
    balls.append(k)
    proven = balls.keeps_nothing(q, 8**-0.5, threshold)
    assert proven.any() and not (proven & ~truly_empty(q, k, threshold)).any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nothing_is_proven_over_a_key_or_query_that_is_not_finite(bad):
    k = few_kinds(1, 2, 100, 8, 4, 0.0)
    q = torch.randn(1, 2, 50, 8)
    balls = KeyBalls()
    balls.append(k)
    q[0, 0, 7, 3] = bad
    assert not balls.keeps_nothing(q, 1.0, 5.0)[0, 0, 7] and balls.keeps_nothing(q, 1.0, 50.0).sum() == 99
    k[0, 1, 60, 2] = bad
    balls = KeyBalls()
    balls.append(k)
    assert not balls.keeps_nothing(q, 1.0, 50.0)[0, 1].any() and balls.keeps_nothing(q, 1.0, 50.0)[0, 0].any()


def test_pieces_and_dtypes_and_inference_mode(monkeypatch):
    k = few_kinds(1, 2, 300, 16, 5, 0.0)
    q = torch.randn(1, 2, 100, 16)
    whole = KeyBalls()
    whole.append(k)
    monkeypatch.setattr(key_balls, "PIECE", 64)
    pieces = KeyBalls()
    with torch.inference_mode():
        pieces.append(k[:, :, :130])
    pieces.append(k[:, :, 130:])  # made inside, changed outside
    assert pieces.length == 300
    assert torch.equal(whole.keeps_nothing(q, 0.25, 1.0), pieces.keeps_nothing(q, 0.25, 1.0))
    half = KeyBalls()
    half.append(k.bfloat16())
    assert not (
        half.keeps_nothing(q.bfloat16(), 0.25, 1.0) & ~truly_empty(q.bfloat16().float(), k.bfloat16().float(), 1.0)
    ).any()


def test_it_is_given_up_when_nothing_comes_of_it(monkeypatch):
    monkeypatch.setattr(key_balls, "PATIENCE", 100)
    balls = KeyBalls()
    balls.append(torch.randn(1, 1, 500, 16))
    q = torch.randn(1, 1, 60, 16)
    assert not balls.keeps_nothing(q, 0.25, 0.0).any() and not balls.is_in_vain
    balls.keeps_nothing(q, 0.25, 0.0)
    assert balls.is_in_vain
    useful = KeyBalls()
    useful.append(few_kinds(1, 1, 500, 16, 1, 0.0))
    assert useful.keeps_nothing(torch.cat((q, q), 2), 0.25, 0.0).any() and not useful.is_in_vain
