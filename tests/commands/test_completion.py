"""Completion: what is offered in place of the word that is being typed, and the scripts that ask for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands.conftest import refused
from traformer.cli import COMMANDS
from traformer.commands.completion import SCRIPTS, candidates
from traformer.methods import METHODS


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["ex"], ["explore"]),
        (["train", "--task", "co"], ["copy"]),
        (["train", "--task=co"], ["--task=copy"]),
        (["train", "--task", "=", "co"], ["copy"]),  # as bash splits it
        (["train", "--preset", "m"], ["mini", "medium"]),
        (["train", "--attention", "rope,stick"], ["rope,stick_breaking", "rope,stick_breaking_equal"]),
        (["train", "--batch-s"], ["--batch-size"]),
        (["convert", "model", "--keep"], ["--keep-positions"]),
        (["show", "ind"], ["induction"]),
        (["list", "pre"], ["presets"]),
        (["list", "--options", "flip"], ["flip_flop"]),
        (["sweep", "--jobs", "2", "what"], ["what_works"]),
        (["report", "x", "--experiment", "what"], ["what_works"]),
        (["reproduce", "flip"], ["flip_flop"]),
        (["reproduce", "copy", "--scale", "l"], ["laptop"]),
        (["bench", "dec"], ["decode"]),
        (["completion", "z"], ["zsh"]),
        (["eval", "run"], []),  # a folder: the shell's own business
        (["train", "--out", "ru"], []),
        (["sweep", "demo", "ru"], []),
        (["nonsense", ""], []),
    ],
)
def test_what_is_offered(words: list[str], offered: list[str]) -> None:
    assert candidates(words) == offered


def test_every_command_and_every_long_flag() -> None:
    assert candidates([""]) == list(COMMANDS) == candidates([])
    for command in COMMANDS:
        assert "--help" in candidates([command, "--"])


def test_it_answers_without_loading_torch() -> None:
    code = (
        "import sys\nfrom traformer.cli import main\n"
        "main(['completion', '--candidates', 'train', '--attention', 'alib'])\n"
        "assert not {'torch', 'transformers', 'matplotlib'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, ["alibi", "alibi_equal"]), done.stderr


@pytest.fixture
def path_with_tra(tmp_path: Path) -> dict[str, str]:
    """An environment in which `tra` is this checkout's."""
    command = tmp_path / "tra"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m traformer "$@"\n')
    command.chmod(0o755)
    return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}


def test_in_bash(path_with_tra: dict[str, str]) -> None:
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    asked = (
        "source <(tra completion bash); COMP_WORDS=(tra train --attention fo); COMP_CWORD=3; _tra; "
        'echo "${COMPREPLY[@]}"; complete -p tra'
    )
    done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, env=path_with_tra)
    names = " ".join(name for name in METHODS if name.startswith("fot"))
    assert done.stdout.splitlines() == [names, "complete -o default -F _tra tra"], done.stderr


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_other_scripts_are_read_by_their_shells(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    script = tmp_path / "script"
    script.write_text(SCRIPTS[shell])
    done = subprocess.run([shell, "-n", str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_without_a_shell_it_asks_for_one(tra) -> None:
    refused(tra("completion"), "which shell? Give one of bash, zsh, fish")
