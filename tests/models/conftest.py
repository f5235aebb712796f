"""Shared tests run for every attention there is."""

from __future__ import annotations

import pytest

from traformer.methods import METHODS

BASIC = sorted(name for name, method in METHODS.items() if not method.is_configuration)


@pytest.fixture(params=BASIC)
def attention(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=[x if x in ("tra", "rope") else pytest.param(x, marks=pytest.mark.slow) for x in BASIC])
def compiled_attention(request: pytest.FixtureRequest) -> str:
    """For tests that trace the model, which takes seconds: those of the peers are left to the slow tests."""
    return request.param
