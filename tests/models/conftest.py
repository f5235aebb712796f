"""Shared tests run for every attention there is."""

from __future__ import annotations

import pytest

from traformer.layers import ATTENTIONS


@pytest.fixture(params=sorted(ATTENTIONS))
def attention(request: pytest.FixtureRequest) -> str:
    return request.param
