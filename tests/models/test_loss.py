"""The chunked cross-entropy against torch's own: value, gradients, chunks of any size, and what it holds at once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from traformer.models import loss as module
from traformer.models.loss import chunk_rows, linear_cross_entropy, token_losses


def problem(rows: int, width: int, vocabulary: int, dtype: torch.dtype = torch.float64, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=generator, dtype=dtype).requires_grad_()
    return hidden, weight, torch.randint(0, vocabulary, (rows,), generator=generator)


def plain(hidden, weight, targets):
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits, targets, reduction="sum"), (logits.argmax(-1) == targets).sum()


@pytest.mark.parametrize("rows,width,vocabulary", [(1, 3, 2), (7, 5, 11), (64, 16, 257), (33, 8, 1)])
@pytest.mark.parametrize("elements", [1, 100, None])
def test_equals_the_plain_loss_and_its_gradients(rows, width, vocabulary, elements) -> None:
    hidden, weight, targets = problem(rows, width, vocabulary)
    loss, right = linear_cross_entropy(hidden, weight, targets, elements)
    expected, expected_right = plain(hidden, weight, targets)
    assert torch.allclose(loss, expected, rtol=1e-12, atol=1e-12)
    assert right == expected_right
    got = torch.autograd.grad(loss * 0.37, (hidden, weight))
    wanted = torch.autograd.grad(expected * 0.37, (hidden, weight))
    for one, other in zip(got, wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-12)


def test_no_rows_give_zero_and_zero_gradients() -> None:
    hidden, weight, targets = problem(0, 4, 9)
    loss, right = linear_cross_entropy(hidden, weight, targets)
    loss.backward()
    assert loss == 0 and right == 0 and not weight.grad.any()


def test_only_wanted_gradients_are_made() -> None:
    hidden, weight, targets = problem(6, 4, 9)
    loss, _ = linear_cross_entropy(hidden.detach(), weight, targets)
    loss.backward()
    assert weight.grad is not None and hidden.grad is None
    with torch.no_grad():
        assert not linear_cross_entropy(hidden, weight, targets)[0].requires_grad


def test_large_logits_stay_finite() -> None:
    hidden, weight, targets = problem(5, 4, 9, torch.float32)
    loss, _ = linear_cross_entropy(hidden * 1e4, weight, targets)
    loss.backward()
    assert loss.isfinite() and hidden.grad.isfinite().all()
    assert torch.allclose(loss, plain(hidden * 1e4, weight, targets)[0], rtol=1e-5)


def test_a_nan_reaches_the_loss() -> None:
    hidden, weight, targets = problem(5, 4, 9)
    with torch.no_grad():
        hidden[2, 1] = float("nan")
    assert linear_cross_entropy(hidden, weight, targets)[0].isnan()


def test_autocast_multiplies_in_bfloat16_and_sums_in_float32() -> None:
    hidden, weight, targets = problem(40, 16, 50, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = linear_cross_entropy(hidden, weight, targets, 300)
    assert loss.dtype == torch.float32
    loss.backward()
    assert weight.grad.dtype == torch.float32
    expected = torch.autograd.grad(plain(hidden, weight, targets)[0], weight)[0]
    assert (weight.grad - expected).norm() < 0.02 * expected.norm()


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation makes, and how many have at least `threshold` elements."""

    def __init__(self, threshold: int) -> None:
        super().__init__()
        self.threshold, self.largest, self.count = threshold, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and not tensor._is_view():
                self.largest = max(self.largest, tensor.numel())
                self.count += tensor.numel() >= self.threshold
        return out


def test_never_holds_tokens_times_vocabulary() -> None:
    rows, width, vocabulary = 512, 8, 1000
    hidden, weight, targets = problem(rows, width, vocabulary, torch.float32)
    with Largest(rows * vocabulary) as seen:
        linear_cross_entropy(hidden, weight, targets, chunk_elements=32_000)[0].backward()
    assert seen.count == 0
    assert seen.largest <= 32_000
    with Largest(rows * vocabulary) as seen:
        plain(hidden, weight, targets)[0].backward()
    assert seen.count >= 3  # logits, their log-softmax, its gradient


def test_chunks_are_even_and_within_the_limit() -> None:
    for rows in (1, 5, 100, 101):
        for elements in (10, 95, 1000):
            size = chunk_rows(rows, 10, elements)
            assert 1 <= size <= max(1, elements // 10)
            assert -(-rows // size) == -(-rows // max(1, elements // 10)) or size == 1


def test_token_losses_of_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 64)
    hidden, weight, targets = problem(37, 6, 13)
    with torch.no_grad():
        expected = F.cross_entropy(F.linear(hidden, weight), targets, reduction="none")
        assert torch.allclose(token_losses(hidden, weight, targets), expected)
