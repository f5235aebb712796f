"""Files and folders that are whole or absent whenever the process or the machine stops, and locks on them.

Everything the project writes goes through here: run folders, checkpoints, results, reports, the token cache.
"""

from __future__ import annotations

import errno
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from traformer.errors import RunError

# Why nothing more can be written although the place and the rights are fine.
_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the limit on the size of a file (ulimit -f) is reached",
}


# Files ----------------------------------------------------------------------------------------------------------


def write_atomically(path: Path, text: str) -> None:
    """Write a file beside `path`, under a name that no other process has, sync it, and rename it over `path`."""
    aside = path.with_name(f"{path.name}.{uuid4().hex[:8]}.writing")
    with _refusals_as_sentences(path):
        try:
            with open(aside, "w", encoding="utf-8") as handle:
                handle.write(text)
                handle.flush()
                os.fsync(handle.fileno())
            os.replace(aside, path)
        except BaseException:
            with suppress(OSError):
                aside.unlink()
            raise
        sync_folder(path.parent)


@contextmanager
def _refusals_as_sentences(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = full_reason(error) or (error.strerror if error.errno in _REFUSED else None)
        if reason is None:
            raise
        raise RunError(f"{path} could not be written: {reason}; the file from before, if any, is unchanged") from error


def sync_file(path: Path) -> None:
    """Make a file's content durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Make renames in a folder durable."""
    sync_file(path)


def full_reason(error: BaseException) -> str | None:
    """Why nothing more could be written (disk, quota or file size), or None if the error is of another kind.

    Libraries in other languages quote the system's error as text: "... (os error 28)".
    """
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (quoted := re.search(r"os error (\d+)", str(error))):
        number = int(quoted[1])
    return _FULL.get(number) if number is not None else None


# Folders --------------------------------------------------------------------------------------------------------

_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP)


def check_folder(path: Path, remedy: str = "choose another --out") -> None:
    """Raise RunError if `path` is not a folder and cannot become one; nothing is made."""
    reason = _folder_fault(path.absolute())
    if reason:
        raise RunError(f"the folder {path} cannot be used: {reason}; {remedy}")


def make_folder(path: Path, remedy: str = "choose another --out") -> Path:
    """`path` as a folder, made with its parents if it is not there; or RunError."""
    check_folder(path, remedy)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = full_reason(error) or error.strerror
        raise RunError(f"the folder {path} cannot be made: {reason}; {remedy}") from error
    return path


def check_file(path: Path) -> None:
    """Raise RunError if no file can be written at `path`: before the work whose result goes there."""
    if path.is_dir():
        raise RunError(f"{path} is a folder; give the name of a file")
    if not path.parent.is_dir():
        raise RunError(f"{path} cannot be written: the folder {path.parent} does not exist; make it first")


def _folder_fault(path: Path) -> str | None:
    """Why a folder is not there and cannot be made, as far as looking reveals."""
    try:
        nearest = next(place for place in (path, *path.parents) if os.path.lexists(place))
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:  # a name too long, a loop of links, a folder that may not be entered
        return (error.strerror or type(error).__name__).lower()
    if nearest.is_symlink() and not nearest.exists():
        return f"{nearest} is a link to {os.readlink(nearest)}, which does not exist"
    if not nearest.is_dir():
        return f"{nearest} is a file"
    if not os.access(nearest, os.W_OK | os.X_OK):
        return f"{nearest} may not be written to"
    return None


def write_folder(path: Path, write_files: Callable[[Path], None]) -> None:
    """Make the folder `path` from what `write_files(folder)` writes: aside, synced, then renamed.

    A folder that was there is replaced. Whenever this stops, `path` is what it was, absent or whole; an exception
    leaves nothing beside it.
    """
    aside, old = path.with_name(f".writing-{path.name}"), path.with_name(f".old-{path.name}")
    for leftover in (aside, old):  # of a process that was killed
        if leftover.exists():
            shutil.rmtree(leftover)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.mkdir()
        write_files(aside)
        for file in aside.iterdir():
            sync_file(file)
        sync_folder(aside)
        if path.exists():
            os.rename(path, old)
        os.rename(aside, path)
        sync_folder(path.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    if old.exists():
        shutil.rmtree(old)


def remove_folder(path: Path) -> None:
    """Delete a folder. It is renamed first, so that a kill never leaves half of it under its own name."""
    old = path.with_name(f".old-{path.name}")
    if old.exists():
        shutil.rmtree(old)
    os.rename(path, old)
    shutil.rmtree(old)


def remove_leftovers(folder: Path) -> None:
    """Delete what killed processes were still writing or deleting in a folder."""
    if folder.is_dir():
        for entry in folder.iterdir():
            if entry.name.startswith((".writing-", ".old-")):
                shutil.rmtree(entry)


# Locks ----------------------------------------------------------------------------------------------------------


class Locked(Exception):
    """Another process holds the lock; `holder` says which."""

    def __init__(self, holder: str) -> None:
        super().__init__(holder)
        self.holder = holder


@contextmanager
def lock(path: Path, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold a lock file; the system releases it however the process ends, kill -9 included.

    If another process holds it: raise Locked, or, with `on_wait`, call that once and wait.
    """
    import fcntl

    with _refusals_as_sentences(path):
        handle = open(path, "a+")  # noqa: SIM115
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if on_wait is None:
                handle.seek(0)
                raise Locked(handle.read().strip() or "another process") from None
            on_wait()
            fcntl.flock(handle, fcntl.LOCK_EX)
        with suppress(OSError):  # on a full disk the lock is held all the same
            os.ftruncate(handle.fileno(), 0)
            os.write(handle.fileno(), f"process {os.getpid()} on {platform.node()}".encode())
        yield


@contextmanager
def changing(path: Path) -> Iterator[None]:
    """Have a file to oneself while it is read and written again; others that ask for it wait."""
    with lock(path.with_name(f".{path.name}.lock"), on_wait=lambda: None):
        yield
