"""The documentation site builds, and a dead link would stop it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs"))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return link_checkout(tmp_path)


def link_checkout(tmp_path: Path) -> Path:
    """What the site is made from, as links into the real checkout."""
    pytest.importorskip("mkdocs", reason="the documentation site needs the extra `docs`")
    for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "mkdocs.yml", "results", "examples", "src"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "docs").mkdir()
    for path in (
        path for pattern in ("*.md", "*.py", "*.ipynb", "*.css", "*.js") for path in (ROOT / "docs").glob(pattern)
    ):
        (tmp_path / "docs" / path.name).write_bytes(path.read_bytes())
    return tmp_path


def build(checkout: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "docs/build.py"]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True)


def test_it_builds_with_every_page_and_needs_no_network(checkout: Path) -> None:
    built = build(checkout)
    assert built.returncode == 0, built.stderr
    site = checkout / "build" / "docs" / "site"
    page = (site / "index.html").read_text(encoding="utf-8")
    for asset in ('src="https://', "src='https://", 'rel="stylesheet" href="https://', "fonts.googleapis"):
        assert asset not in page
    for name, text in {
        "methods": "tra_plus", "api": "threshold_relative_attention", "tutorial": "evaluate_run",
        "reproduce": "laptop", "getting_started": "make demo",
    }.items():  # fmt: skip
        assert text in (site / "docs" / f"{name}.html").read_text(encoding="utf-8"), name


def test_every_method_has_an_entry_with_its_source_and_what_was_measured() -> None:
    """In the catalogue's order: a heading, the layer's own words or what it configures, and results or none."""
    from methods_page import heading, methods_page

    from traformer.methods import METHODS

    page = methods_page(ROOT / "results")
    entries = page.split("\n## ")[1:]
    assert [entry.partition("\n")[0] for entry in entries] == [heading(method) for method in METHODS.values()]
    for entry, method in zip(entries, METHODS.values(), strict=True):
        assert ("A named configuration of" if method.is_configuration else "Source:") in entry, method.name
        assert ("| results |" in entry) != ("No committed result" in entry)


@pytest.mark.slow
def test_a_dead_link_stops_it(checkout: Path) -> None:
    with open(checkout / "docs" / "kernel.md", "a", encoding="utf-8") as page:
        page.write("\nSee [nothing](nowhere.md).\n")
    built = build(checkout)
    assert built.returncode != 0 and "nowhere.md" in built.stderr
