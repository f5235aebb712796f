"""Denormal numbers in torch's own threads."""

from __future__ import annotations

import pytest
import torch

from traformer.devices import flush_denormals
from traformer.ops.threshold_relative import cpu


def share_flushed() -> float:
    """Of products that underflow, computed by all threads of torch's pool, the share that came out as 0."""
    return ((torch.full((1 << 20,), 1e-30) * 1e-10).view(torch.int32) == 0).float().mean().item()


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.skipif(not cpu.is_available(), reason=str(cpu.unavailable_reason()))
def test_flushing_reaches_every_thread_and_ends_with_the_block(two_threads):
    assert share_flushed() == 0.0
    with flush_denormals():
        assert share_flushed() == 1.0
        with flush_denormals():
            pass
        assert share_flushed() == 1.0
    assert share_flushed() == 0.0
    with pytest.raises(ZeroDivisionError), flush_denormals():
        raise ZeroDivisionError
    assert share_flushed() == 0.0
    assert flush_denormals()(share_flushed)() == 1.0


def test_without_the_kernel_the_calling_thread_flushes(monkeypatch):
    monkeypatch.setattr(cpu, "_load", lambda: (None, "not compiled"))
    small = torch.full((1,), 1e-30)
    with flush_denormals():
        assert (small * 1e-10).view(torch.int32).item() == 0
    assert (small * 1e-10).view(torch.int32).item() != 0
