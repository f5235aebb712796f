"""What is claimed in pyproject.toml and checked at import agree, and an older package is one sentence."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from traformer import versions

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("package", sorted(versions.OLDEST))
def test_the_claim_is_the_check(package: str) -> None:
    oldest = ".".join(str(part) for part in versions.OLDEST[package])
    assert f'"{package}>={oldest},<' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    versions.require(package)


@pytest.mark.parametrize(
    ("found", "fits"),
    [("2.13.0+cpu", True), ("2.14.0a0+git12", True), ("3.0", True), ("2.12.1", False), ("1.13.1", False)],
)
def test_versions_are_compared_as_numbers(monkeypatch: pytest.MonkeyPatch, found: str, fits: bool) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: found)
    if fits:
        versions.require("torch")
    else:
        with pytest.raises(versions.VersionError, match=rf"torch {found} is too old: .*2\.13 and later"):
            versions.require("torch")


@pytest.mark.parametrize("package", sorted(versions.OLDEST))
def test_an_old_package_is_a_sentence(tmp_path: Path, package: str) -> None:
    """Before the package is imported: metadata of an old version is found first."""
    info = tmp_path / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import traformer.models"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1].startswith(f"traformer.versions.VersionError: {package} 1.0 is too old")
