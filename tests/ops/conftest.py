"""Uninitialised memory is filled with NaN here, so that an output which a kernel forgot to write shows."""

import os

import pytest
import torch

# On a GPU, deterministic algorithms include cuBLAS, which then wants a workspace of fixed size.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True)
def uninitialised_memory_is_nan():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)
