"""Every test has a cache folder of its own; the shared corpus is used where it is at hand."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path / "cache"
    monkeypatch.setenv("TRAFORMER_CACHE", str(cache))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return cache


@pytest.fixture(scope="session")
def shared() -> Path:
    """Real text and GPT-2's files."""
    folder = Path(__file__).resolve().parents[3] / "shared" / "data"
    if not (folder / "gpt2" / "encoder.json").exists():
        pytest.skip("the shared corpus is not at hand")
    return folder
