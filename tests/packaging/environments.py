"""Wheels, and environments to install them in, for the tests of this folder."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def build(kind: str, target: Path, source: Path = ROOT, env: dict[str, str] | None = None, **settings: str) -> Path:
    """An sdist or wheel of `source` in `target`, as pip would build it, without a network."""
    code = (
        "import json, os, sys\n"
        "from scikit_build_core import build\n"
        "kind, target, source, settings = sys.argv[1:]\n"
        "os.chdir(source)\n"
        "print('built', getattr(build, f'build_{kind}')(target, json.loads(settings)))\n"
    )
    import json

    target.mkdir(parents=True, exist_ok=True)
    arguments = [sys.executable, "-c", code, kind, str(target), str(source), json.dumps(settings)]
    done = subprocess.run(arguments, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return target / done.stdout.rpartition("built ")[2].strip()


class Environment:
    """A new virtual environment with one wheel in it; the packages it depends on are those that the tests run with."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        venv.create(folder, symlinks=True, with_pip=False)
        self.python = folder / "bin" / "python"
        self.site_packages = next((folder / "lib").glob("python*/site-packages"))
        # A plain path: what lies in it can be imported, but an editable install registered there does not act.
        (self.site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
        pip = [sys.executable, "-m", "pip", "--python", str(self.python), "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], check=True)
        self.variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        self.variables |= {"PATH": f"{self.python.parent}:{os.environ['PATH']}", "PYTHONSAFEPATH": "1"}

    def run(self, *command: str, cwd: Path, status: int = 0, **variables: str) -> str:
        """What a command prints, stderr included."""
        done = subprocess.run(
            command, cwd=cwd, env={**self.variables, **variables}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == status, f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}"
        assert "Traceback" not in done.stdout, done.stdout
        return done.stdout
