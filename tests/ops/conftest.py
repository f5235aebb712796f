"""Uninitialised memory is filled with NaN here, so that an output which a kernel forgot to write shows."""

import pytest
import torch


@pytest.fixture(autouse=True)
def uninitialised_memory_is_nan():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)
