"""The built-in corpus: the sources, docstrings included, of the standard library of the Python that runs this.

They are on every machine, about 10 MB, so text runs need no network and no files. The corpus is named after the exact
version of Python, python-stdlib-3.11.7, because its text differs from version to version.
"""

from __future__ import annotations

import hashlib
import platform
import sys
import sysconfig
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from traformer.data.sources import Line, Source, TextFile
from traformer.errors import InputError

NAME = "python-stdlib"
# Left out: tests, and what some systems pack apart from Python, so that one version has one text everywhere.
_LEFT_OUT = {"test", "tests", "idlelib", "tkinter", "turtle", "turtledemo", "lib2to3", "ensurepip", "distutils"}
_SHARES = 20  # one in so many files is validation text, and one is test text


def version_name() -> str:
    """The corpus's full name on this Python."""
    return f"{NAME}-{platform.python_version()}"


def is_stdlib(place: str) -> bool:
    return place == NAME or place.startswith(f"{NAME}-")


def sources(place: str) -> list[tuple[str, Source]]:
    """(split, source) for each split; a name with another Python's version is refused."""
    if place not in (NAME, version_name()):
        raise InputError(
            f"data {place!r} is the standard library of another Python than this one, {platform.python_version()}; "
            f"run it with that one, or name {version_name()} or another text"
        )
    folder = Path(sysconfig.get_path("stdlib"))
    files: dict[str, list[Path]] = {}
    for file in find_files(folder):
        files.setdefault(split_of(file.relative_to(folder).as_posix()), []).append(file)
    if set(files) != {"train", "validation", "test"}:
        raise InputError(
            f"this Python has no sources of its standard library in {folder}; name a file, a folder or wikitext-103 "
            "as data"
        )
    return [(split, PythonSources(f"{version_name()} {split}", folder, found)) for split, found in files.items()]


def find_files(folder: Path) -> list[Path]:
    """Modules of the standard library in order of their paths; nothing installed on top of it."""
    found = []
    for module in sys.stdlib_module_names - _LEFT_OUT:
        for file in [folder / f"{module}.py", *(folder / module).rglob("*.py")]:
            inside = file.relative_to(folder).parts[:-1]
            if _LEFT_OUT.isdisjoint(inside) and file.is_file() and file.stat().st_size:
                found.append(file)
    return sorted(found)


def split_of(path: str) -> str:
    """By a hash of the file's path, so that a file keeps its split from version to version."""
    share = int(hashlib.sha256(path.encode()).hexdigest()[:8], 16) % _SHARES
    return {0: "validation", 1: "test"}.get(share, "train")


class PythonSources(Source):
    """Many files as one stream; each is a document."""

    def __init__(self, name: str, folder: Path, files: list[Path]) -> None:
        self.name, self.folder, self.files = name, folder, files

    @cached_property
    def size(self) -> int:  # type: ignore[override]
        return sum(file.stat().st_size for file in self.files)

    def content_hash(self) -> str:
        digest = hashlib.sha256()
        for file in self.files:
            try:
                content = file.read_bytes()
            except OSError as error:
                raise InputError(f"{file} cannot be read: {error.strerror}") from None
            digest.update(f"{file.relative_to(self.folder).as_posix()} {len(content)}\n".encode())
            digest.update(content)
        return digest.hexdigest()

    def lines(self) -> Iterator[Line]:
        before = 0
        for file in self.files:
            for line in TextFile(file).lines():
                yield line._replace(done=before + line.done)
            before += file.stat().st_size
