"""The kernels on a CPU: kernels/ in a process of its own with TRITON_INTERPRET=1."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "kernels"
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def run_kernels(selection: str, *files: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", selection]
    command += [str(FOLDER / name) for name in files] or [str(FOLDER)]
    result = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, cwd=FOLDER.parents[3]
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]


def test_quick_set():
    run_kernels("not slow")


@pytest.mark.slow
def test_whole_set():
    run_kernels("slow")
