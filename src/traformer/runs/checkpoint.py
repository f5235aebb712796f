"""Checkpoints: written aside, synced, renamed; read back only if every byte is what the manifest says.

    checkpoints/step-500/
        config.json  model.safetensors     what `TraformerForCausalLM.from_pretrained` reads
        optimizer.safetensors              "<state name>/<parameter name>", whole however many processes wrote it
        state.json                         the loop's counters
        manifest.json                      size and sha256 of each file above

A random state is not among them: every step seeds itself from (seed, step, rank), and examples are drawn by index.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from traformer.errors import RunError
from traformer.storage import full_reason, remove_folder, write_folder
from traformer.terminal import warn as show_warning
from traformer.types import JsonObject

MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk."""

    path: Path
    step: int

    def state(self) -> JsonObject:
        state: JsonObject = json.loads((self.path / "state.json").read_text(encoding="utf-8"))
        return state

    def fault(self) -> str | None:
        """What is wrong with it, or None if every file has the size and sha256 of the manifest."""
        try:
            files = json.loads((self.path / MANIFEST).read_text(encoding="utf-8"))["files"]
            for name, expected in files.items():
                file = self.path / name
                if not file.is_file():
                    return f"{name} is missing"
                if file.stat().st_size != expected["size"]:
                    return f"{name} has {file.stat().st_size} bytes, not {expected['size']}"
                if sha256(file) != expected["sha256"]:
                    return f"{name} differs from its sha256"
        except OSError as error:
            return f"{Path(error.filename or MANIFEST).name} cannot be read"
        except (ValueError, KeyError, TypeError, AttributeError):
            return f"{MANIFEST} is damaged"
        return None


def sha256(path: Path) -> str:
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def all_checkpoints(folder: Path) -> list[Checkpoint]:
    """Oldest first; what is still being written does not count."""
    if not folder.is_dir():
        return []
    found = [(match, entry) for entry in folder.iterdir() if (match := _NAME.fullmatch(entry.name))]
    return sorted((Checkpoint(entry, int(match[1])) for match, entry in found), key=lambda item: item.step)


def latest_good(folder: Path, warn: Callable[[str], None] = show_warning) -> Checkpoint | None:
    """The newest checkpoint that is whole. Each damaged one that is passed over is named to `warn`."""
    for checkpoint in reversed(all_checkpoints(folder)):
        fault = checkpoint.fault()
        if fault is None:
            return checkpoint
        warn(f"checkpoint {checkpoint.path} is damaged ({fault}) and is passed over")
    return None


def set_aside_after(folder: Path, step: int) -> None:
    """Rename what is newer than `step`, and so damaged, to `damaged-...`: rotation must not count it."""
    for checkpoint in all_checkpoints(folder):
        if checkpoint.step > step:
            aside = folder / f"damaged-{checkpoint.path.name}"
            if aside.exists():
                shutil.rmtree(aside)
            os.rename(checkpoint.path, aside)


def save(folder: Path, step: int, write_files: Callable[[Path], None], keep: int) -> Checkpoint:
    """Make `step-N` from what `write_files(folder)` writes, then rotate. Whenever this stops, older ones are intact."""
    final = folder / f"step-{step}"

    def write_all(aside: Path) -> None:
        write_files(aside)
        write_manifest(aside, step)

    try:
        write_folder(final, write_all)  # in place of a damaged one, where a resumed run comes to its step again
    except Exception as error:
        reason = full_reason(error)
        if reason is None:
            raise
        raise RunError(
            f"{reason}, so the checkpoint of step {step} could not be written; {intact(folder)}; make room and resume"
        ) from error
    rotate(folder, keep)
    return Checkpoint(final, step)


def intact(folder: Path) -> str:
    """What can be resumed from, for an error message."""
    good = latest_good(folder)
    return f"{good.path} is intact" if good else "there is no earlier checkpoint"


def write_manifest(folder: Path, step: int) -> None:
    files = {file.name: {"size": file.stat().st_size, "sha256": sha256(file)} for file in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(json.dumps({"step": step, "files": files}, indent=1), encoding="utf-8")


def rotate(folder: Path, keep: int) -> None:
    """Delete all but the newest `keep`."""
    for checkpoint in all_checkpoints(folder)[:-keep]:
        remove_folder(checkpoint.path)
