"""Files and datasets as streams of lines, in constant memory, each with a hash of its content.

A source yields `Line(text, starts_document, done)`: text ends with a line end unless the line was longer than
LONGEST_READ or is the file's last; `done` is how much of `size` has been read, for a progress bar.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from traformer.errors import InputError, first_line

LONGEST_READ = 1 << 16  # characters of one line read at once, so that a file without line ends needs no more memory
_HEADER_LINES = 1000  # a Gutenberg header is looked for in these

_GUTENBERG_START = re.compile(r"\*\*\* ?START OF (THE|THIS) PROJECT GUTENBERG", re.IGNORECASE)
_GUTENBERG_END = re.compile(
    r"\*\*\* ?END OF (THE|THIS) PROJECT GUTENBERG|End of (the )?Project Gutenberg", re.IGNORECASE
)
# An article's title in WikiText, " = Title = "; sections have "= =".
_WIKITEXT_TITLE = re.compile(r" = (?!= ).*(?<! =) = $")


class Line(NamedTuple):
    text: str
    starts_document: bool
    done: int


class Source(ABC):
    """One stream of text."""

    name: str

    @property
    @abstractmethod
    def size(self) -> int:
        """How much there is to read, in bytes or rows."""

    @abstractmethod
    def content_hash(self) -> str:
        """The same for the same content, wherever it is stored."""

    @abstractmethod
    def lines(self) -> Iterator[Line]:
        """The text, a line or a long line's part at a time."""


class TextFile(Source):
    """A UTF-8 file: one document, without Project Gutenberg's header and licence if it has them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path)

    @property
    def size(self) -> int:
        return self.path.stat().st_size

    def content_hash(self) -> str:
        return file_hash(self.path)

    def lines(self) -> Iterator[Line]:
        starts = True
        for text, done in without_gutenberg_licence(self._raw_lines()):
            yield Line(text, starts, done)
            starts = False

    def _raw_lines(self) -> Iterator[tuple[str, int]]:
        """(line, bytes read so far); a byte order mark is dropped, CR LF and CR become LF."""
        done = 0
        try:
            with open(self.path, encoding="utf-8-sig", newline=None) as handle:
                while text := handle.readline(LONGEST_READ):
                    done += len(text)
                    if "\0" in text:
                        raise InputError(f"{self.path} holds zero bytes, so it is not UTF-8 text; convert it first")
                    yield text, done
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            raise InputError(
                f"{self.path} is not UTF-8 text (byte 0x{byte:02x}: {error.reason}); convert it first, for example "
                f"with: iconv -f latin1 -t utf-8"
            ) from None
        except OSError as error:
            raise InputError(f"{self.path} cannot be read: {error.strerror}") from None


class WikiTextFile(TextFile):
    """A file of WikiText (.tokens): many articles, each a document."""

    def lines(self) -> Iterator[Line]:
        yield from articles(self._raw_lines())


class ParquetFile(Source):
    """A column of text: a row is a document, or a line where rows are WikiText's lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path)
        parquet = _import("pyarrow.parquet", "parquet files", str(path))
        try:
            self._file = parquet.ParquetFile(path)
        except Exception as error:
            raise InputError(f"{path} is not a readable parquet file: {first_line(error)}") from None
        columns = [column.name for column in self._file.schema_arrow if str(column.type) in ("string", "large_string")]
        if "text" not in columns and len(columns) != 1:
            found = ", ".join(columns) or "none"
            raise InputError(f"{path} must have a column 'text' or exactly one column of strings; it has: {found}")
        self._column = "text" if "text" in columns else columns[0]

    @property
    def size(self) -> int:
        return self._file.metadata.num_rows

    def content_hash(self) -> str:
        return file_hash(self.path)

    def lines(self) -> Iterator[Line]:
        yield from rows_to_lines(
            value or ""
            for batch in self._file.iter_batches(256, columns=[self._column])
            for value in batch[0].to_pylist()
        )


class HubSplit(Source):
    """A split of a dataset that `datasets` has loaded; its rows are read from its own memory-mapped files."""

    def __init__(self, name: str, split: Any) -> None:
        self.name = name
        self._split = split

    @property
    def size(self) -> int:
        return len(self._split)

    def content_hash(self) -> str:
        return f"datasets {self.name} {self._split._fingerprint}"

    def lines(self) -> Iterator[Line]:
        yield from rows_to_lines(
            value for start in range(0, self.size, 1024) for value in self._split[start : start + 1024]["text"]
        )


def rows_to_lines(rows: Iterator[str]) -> Iterator[Line]:
    """Rows of a table as lines: WikiText's, where the first row is empty or ends a line; else a row is a document."""

    def numbered() -> Iterator[tuple[str, int]]:
        for number, text in enumerate(rows, 1):
            yield text, number

    stream = numbered()
    first = next(stream, None)
    if first is None:
        return
    if first[0] == "" or first[0].endswith("\n"):
        # The hub's copy has "" where the files have " \n".
        yield from articles((text or " \n", done) for text, done in _chain(first, stream))
        return
    for text, done in _chain(first, stream):
        if text:
            for number, line in enumerate(text.splitlines(keepends=True)):
                yield Line(line, number == 0, done)
            if not text.endswith("\n"):
                yield Line("\n", False, done)


def _chain(first: tuple[str, int], rest: Iterator[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    yield first
    yield from rest


def articles(lines: Iterator[tuple[str, int]]) -> Iterator[Line]:
    """WikiText's lines; a title after a blank line starts a document, and so does the very first line.

    Blank lines before the first title belong to the first article.
    """
    seen_title = False
    after_blank = first = True
    for text, done in lines:
        title = after_blank and _WIKITEXT_TITLE.match(text.rstrip("\n")) is not None
        yield Line(text, first or (title and seen_title), done)
        seen_title |= title
        after_blank, first = not text.strip(), False


def without_gutenberg_licence(lines: Iterator[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """The text between the START and END marks; everything if there is no START mark near the top."""
    head: list[tuple[str, int]] = []
    is_gutenberg = False
    for text, done in lines:
        if _GUTENBERG_START.match(text):
            is_gutenberg = True
            break
        head.append((text, done))
        if len(head) >= _HEADER_LINES:
            break
    if not is_gutenberg:
        yield from head
        yield from lines
        return
    blank: list[tuple[str, int]] = []  # held back, so that none are left at either end
    begun = False
    for text, done in lines:
        if _GUTENBERG_END.match(text):
            return
        if not text.strip():
            blank.append((text, done))
            continue
        if begun:
            yield from blank
        begun, blank = True, []
        yield text, done


def file_hash(path: Path) -> str:
    """sha256 of a file's content; kept under its path, size and time of change, so that large files are read once."""
    from traformer.data.cache import cache_folder, write_json

    try:
        state = path.stat()
        remembered = (
            cache_folder() / "hashes" / (hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32] + ".json")
        )
        stamp = {"size": state.st_size, "changed": state.st_mtime_ns}
        try:
            known = json.loads(remembered.read_text(encoding="utf-8"))
            if {key: known[key] for key in stamp} == stamp:
                return known["sha256"]
        except (OSError, ValueError, KeyError, TypeError):
            pass
        digest = hashlib.sha256()
        with open(path, "rb") as handle:
            while block := handle.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    write_json(remembered, {**stamp, "sha256": digest.hexdigest()})
    return digest.hexdigest()


def _import(module: str, what: str, name: str) -> Any:
    from importlib import import_module

    try:
        return import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise InputError(
            f"{name}: reading {what} needs the package {package}; install it with: pip install 'traformer[text]'"
        ) from None
