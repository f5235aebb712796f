"""Writing files so that they are complete or absent, never half, whenever the process or the machine stops."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Write beside `path`, sync, and rename over it."""
    aside = path.with_name(path.name + ".writing")
    with open(aside, "w", encoding="utf-8") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(aside, path)
    sync_folder(path.parent)


def sync_file(path: Path) -> None:
    """Make the file's content durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Make renames in a folder durable."""
    sync_file(path)


def is_disk_full(error: BaseException) -> bool:
    """Whether an error, from Python or from a library that wraps the system's, says that the disk or quota is full."""
    full = (errno.ENOSPC, errno.EDQUOT)
    if isinstance(error, OSError) and error.errno in full:
        return True
    return any(f"os error {code}" in str(error) for code in full)
