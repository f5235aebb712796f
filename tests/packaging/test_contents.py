"""What goes into a wheel and an sdist, and what the package says that it needs. Nothing is compiled here."""

from __future__ import annotations

import ast
import re
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.packaging.environments import ROOT, build

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# import name -> name on PyPI, where they differ
DISTRIBUTIONS = {"yaml": "pyyaml"}


def sources() -> set[str]:
    """Every file of the package, as a path within it."""
    return {
        file.relative_to(ROOT / "src").as_posix()
        for file in (ROOT / "src" / "traformer").rglob("*")
        if file.is_file() and "__pycache__" not in file.parts and file.parent.name != "_native"
    }


def test_a_wheel_holds_every_file_of_the_package(tmp_path: Path) -> None:
    pytest.importorskip("scikit_build_core")
    wheel = build("wheel", tmp_path, **{"wheel.cmake": "false"})
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    assert {name for name in names if ".dist-info/" not in name} == sources()
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_an_sdist_holds_what_a_wheel_is_built_from(tmp_path: Path) -> None:
    pytest.importorskip("scikit_build_core")
    with tarfile.open(build("sdist", tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    kernel = {file.relative_to(ROOT).as_posix() for file in (ROOT / "csrc").glob("*.[hc]*")}
    kernel.add("csrc/cmake/CMakeLists.txt")
    assert {"pyproject.toml", "README.md", "LICENSE", "PKG-INFO"} | kernel <= names
    assert {f"src/{name}" for name in sources()} <= names
    assert not [name for name in names if name.endswith(".so") or "__pycache__" in name]


def imported() -> dict[str, str]:
    """Packages imported anywhere in the package, at the top or in a function, and a file that does."""
    found: dict[str, str] = {}
    for file in (ROOT / "src" / "traformer").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                modules = [node.module]
            for module in modules:
                found.setdefault(module.partition(".")[0], file.relative_to(ROOT).as_posix())
    return {name: file for name, file in found.items() if name not in sys.stdlib_module_names and name != "traformer"}


def test_every_import_is_declared() -> None:
    extras = [line for lines in PROJECT["optional-dependencies"].values() for line in lines]
    declared = {re.split(r"[<>=!~\[; ]", line)[0].lower() for line in [*PROJECT["dependencies"], *extras]}
    needed = {DISTRIBUTIONS.get(name, name): file for name, file in imported().items()}
    assert not {name: file for name, file in needed.items() if name not in declared}


def test_versions_agree() -> None:
    import traformer

    assert PROJECT["version"] == traformer.__version__
