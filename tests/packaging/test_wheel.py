"""A wheel, built from an sdist and installed into an empty environment, does everything the checkout does."""

from __future__ import annotations

import os
import shutil
import tarfile
from pathlib import Path

import pytest

from tests.packaging.environments import Environment, build
from traformer.cli import COMMANDS

pytest.importorskip("scikit_build_core")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("cmake") is None, reason="building needs cmake"),
]
COMPILERS = ("c++", "g++", "clang++")
SWEEP = """
from traformer.experiments import demo

def cells():  # the demo's, with next to no training
    return [cell.__class__(cell.name, cell.config.replace(steps=2, batch_size=4), cell.lengths.split(",")[0], 2)
            for cell in demo.cells(0)[::2]]
"""
LLAMA = """
from transformers import LlamaConfig, LlamaForCausalLM
LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                             num_attention_heads=2)).save_pretrained("llama")
"""


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist's content."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build("sdist", folder)) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    return source


@pytest.fixture(scope="module")
def installed(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    if not any(shutil.which(name) for name in COMPILERS):
        pytest.skip("there is no C++ compiler here")
    folder = tmp_path_factory.mktemp("wheel")
    return Environment(folder / "environment", build("wheel", folder, unpacked))


@pytest.fixture(scope="module")
def without_compiler(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Installed where there is cmake, but no compiler on the path."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "bin").mkdir()
    for tool in ("cmake", "ninja", "make"):
        if found := shutil.which(tool):
            (folder / "bin" / tool).symlink_to(found)
    bare = {name: value for name, value in os.environ.items() if name not in ("CC", "CXX", "CMAKE_PREFIX_PATH")}
    wheel = build("wheel", folder, unpacked, env={**bare, "PATH": str(folder / "bin")})
    assert wheel.name.endswith("-py3-none-any.whl"), "a compiler was found all the same"
    return Environment(folder / "environment", wheel)


def files(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*") if path.suffix != ".pyc"}


def test_every_command_works_outside_the_checkout(installed: Environment, tmp_path: Path) -> None:
    package = installed.site_packages / "traformer"
    before = files(package)
    (tmp_path / "tiny.py").write_text(SWEEP)

    ran = set()

    def tra(*command: str) -> str:
        if "--help" not in command:
            ran.add(command[0])
        return installed.run("tra", *command, cwd=tmp_path, TRAFORMER_CACHE=str(tmp_path / "cache"))

    where = installed.run("python", "-c", "import traformer; print(traformer.__file__)", cwd=tmp_path)
    assert Path(where.strip()).parent == package
    assert "backend cpu: ready" in installed.run("python", "-m", "traformer.ops", cwd=tmp_path)
    for command in COMMANDS:
        assert f"usage: tra {command}" in tra(command, "--help")
    assert "tra_plus" in tra("list")
    assert "complete" in tra("completion", "bash")
    assert "copy" in tra("show", "copy")
    assert "python-stdlib" in tra("data", "python-stdlib")
    small = ["--preset", "tiny", "--layers", "1", "--steps", "4", "--batch-size", "4"]
    tra("train", "--task", "copy", "--length", "4", "--attention", "tra_plus", *small, "--out", "run")
    tra("train", "--task", "copy", "--length", "4", *small, "--out", "run", "--resume", "--attention", "tra_plus")
    tra("eval", "run", "--lengths", "4,8", "--examples", "4")
    tra("generate", "run", "--prompt", "<bos>", "--max-new-tokens", "3")
    tra("diagnose", "run", "--lengths", "8", "--examples", "2")
    tra("stretch", "run", "--lengths", "64", "--examples", "1")
    tra("explore", "run", "--lengths", "4", "--out", "explore.html")
    tra("report", "run")
    assert (tmp_path / "run" / "report.html").stat().st_size > 1000
    tra("sweep", "tiny.py", "--jobs", "1", "--out", "sweep")
    assert (tmp_path / "sweep" / "report.html").exists()
    for config in ("text-small", "text-laptop"):
        tra("train", "--config", config, *small, "--log-every", "2", "--out", config)
    installed.run("python", "-c", LLAMA, cwd=tmp_path)
    tra("convert", "llama", "--attention", "tra_plus", "--out", "converted")
    tra("reproduce", "induction", "--scale", "smoke", "--seeds", "1", "--jobs", "1")
    tra("bench", "attention", "--lengths", "64", "--rounds", "1")
    # The demo takes minutes, and two of its cells are in the sweep; `layers` needs a model with a tokenizer.
    assert set(COMMANDS) - ran == {"demo", "layers"}
    assert files(package) == before, "a command wrote into the installed package"


def test_without_a_compiler_it_installs_and_says_that_it_is_slower(
    without_compiler: Environment, tmp_path: Path
) -> None:
    assert not list(without_compiler.site_packages.rglob("libtraformer*"))
    said = without_compiler.run("python", "-m", "traformer.ops", cwd=tmp_path)
    assert "backend blockwise: ready" in said and "backend cpu: not here" in said
    assert "attention on the CPU uses the slower pure-torch path" in said
    small = ["--preset", "tiny", "--layers", "1", "--steps", "2", "--batch-size", "4", "--out", "run"]
    said = without_compiler.run("tra", "train", "--task", "copy", "--length", "4", *small, cwd=tmp_path)
    assert said.count("slower") == 1
    without_compiler.run("tra", "eval", "run", "--lengths", "4", "--examples", "4", cwd=tmp_path)
