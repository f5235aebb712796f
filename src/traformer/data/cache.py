"""Tokens on disk: written once, complete or absent, and read through a memory map.

    <cache>/tokens/<key>/        key: hash of the sources' content, the tokenizer, the separator and VERSION
        tokens.bin               uint16 or uint32, every token in order
        documents.bin            int64 [documents], the index of each document's first token
        counts.bin               int64 [pieces, 4], tokens, words, line ends and bytes up to the end of each piece
        meta.json                sizes and names

A folder is built aside under a lock and renamed, so two processes that want the same one build it once, and a kill, a
full disk or a bad file leaves nothing half done.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
from numpy.typing import DTypeLike, NDArray

from traformer.data.pieces import Piece, pieces
from traformer.errors import InputError, RunError
from traformer.storage import full_reason, lock, make_folder, write_folder
from traformer.terminal import ProgressBar, say
from traformer.types import JsonObject

if TYPE_CHECKING:
    from traformer.data.sources import Source
    from traformer.data.tokenizers import TextTokenizer

VERSION = 1
ELSEWHERE = "name another place in TRAFORMER_CACHE"
BATCH = 256  # pieces tokenised at once: enough for all cores, some MB of text


def cache_folder() -> Path:
    """$TRAFORMER_CACHE, or traformer in the user's cache folder."""
    if named := os.environ.get("TRAFORMER_CACHE"):
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "traformer"


@dataclass(frozen=True)
class Counts:
    """How much text some tokens represent."""

    tokens: int
    words: int  # separated by white space
    line_ends: int
    bytes: int

    def __sub__(self, other: Counts) -> Counts:
        return Counts(
            self.tokens - other.tokens,
            self.words - other.words,
            self.line_ends - other.line_ends,
            self.bytes - other.bytes,
        )


class TokenizedText:
    """The tokens of one split, from `start` to `stop` of a cache folder; opening it reads nothing but its sizes."""

    def __init__(self, folder: Path, start: int = 0, stop: int | None = None) -> None:
        self.folder = folder
        try:
            self.meta: JsonObject = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
            self.start, self.stop = start, int(self.meta["tokens"]) if stop is None else stop
            self.source = str(self.meta["sources"][0])  # the first, to name the text by
            if self.meta["dtype"] not in ("uint16", "uint32"):
                raise ValueError("not a type that tokens are stored in")
            if self.stop < self.start:
                raise ValueError("not a number of tokens")
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            raise self._damaged("meta.json") from None

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def fingerprint(self) -> str:
        """The same for the same content in the same tokens, wherever the text lies."""
        return self.folder.name

    @property
    def dtype(self) -> str:
        return self.meta["dtype"]

    @cached_property
    def tokens(self) -> NDArray[np.integer]:
        """[tokens] uint16 or uint32, a memory map."""
        return self._map("tokens.bin", self.dtype)[self.start : self.stop]

    @cached_property
    def documents(self) -> NDArray[np.int64]:
        """Where documents start, from the first token of this text on."""
        starts = self._map("documents.bin", "int64")
        inside = starts[(starts > self.start) & (starts < self.stop)]
        return np.concatenate([[0], inside - self.start])

    @cached_property
    def _counts(self) -> NDArray[np.int64]:
        return self._map("counts.bin", "int64").reshape(-1, 4).astype(np.int64, copy=False)

    def _map(self, name: str, dtype: str) -> NDArray[np.integer]:
        """A file as a memory map, if it still has the size that it was written with."""
        try:
            if (self.folder / name).stat().st_size != self.meta["files"][name]:
                raise self._damaged(name)
            return np.memmap(self.folder / name, dtype=dtype, mode="r")
        except (OSError, ValueError, KeyError, TypeError):
            raise self._damaged(name) from None

    def _damaged(self, name: str) -> RunError:
        return RunError(
            f"the token cache {self.folder} is damaged ({name} is missing, cut short or changed); delete that folder "
            "and run the command again, which rebuilds it"
        )

    @property
    def counts(self) -> Counts:
        """Counts for this text, whose ends are the ends of pieces."""
        return self._counts_to(self.stop) - self._counts_to(self.start)

    def _counts_to(self, token: int) -> Counts:
        if token == 0:
            return Counts(0, 0, 0, 0)
        row = int(np.searchsorted(self._counts[:, 0], token))
        if row == len(self._counts):  # no piece ends there or later: a byte of the file has changed
            raise self._damaged("counts.bin")
        return Counts(*(int(value) for value in self._counts[row]))

    def split_tail(self, share: float) -> tuple[TokenizedText, TokenizedText]:
        """This text in two: the second is about the last `share` of its tokens and starts where a piece starts."""
        ends = self._counts[:, 0]
        ends = ends[(ends > self.start) & (ends < self.stop)]
        if not len(ends):
            raise InputError(
                f"{self.source} is too short to hold out a part of it as validation text; "
                "add a file with 'valid' in its name"
            )
        cut = int(ends[np.abs(ends - (self.stop - share * len(self))).argmin()])
        return TokenizedText(self.folder, self.start, cut), TokenizedText(self.folder, cut, self.stop)


def tokenize(
    sources: Sequence[Source], tokenizer: TextTokenizer, separator: bool = False, quiet: bool = False
) -> TokenizedText:
    """The tokens of the sources, in order, from the cache or made now; `separator` puts a mark before documents."""
    if separator and tokenizer.end_id is None:
        raise InputError(f"the tokenizer {tokenizer.label!r} has no end-of-text token, so separator must be false")
    content = [source.content_hash() for source in sources]
    facts = [VERSION, content, tokenizer.fingerprint, separator]
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]

    def build(folder: Path) -> None:
        _write_tokens(folder, sources, tokenizer, separator, quiet)

    folder = cached_folder(cache_folder() / "tokens" / key, build, f"tokens of {sources[0].name}", _is_whole, quiet)
    return TokenizedText(folder)


def _is_whole(folder: Path) -> bool:
    """Whether every file has the size that meta.json says."""
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        return all((folder / name).stat().st_size == size for name, size in meta["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _write_tokens(
    folder: Path, sources: Sequence[Source], tokenizer: TextTokenizer, separator: bool, quiet: bool
) -> None:
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    began = time.perf_counter()
    total = np.zeros(4, dtype=np.int64)  # tokens, words, line ends, bytes
    with ExitStack() as stack:
        token_file, document_file, count_file = (
            stack.enter_context(open(folder / name, "wb")) for name in ("tokens.bin", "documents.bin", "counts.bin")
        )
        progress = stack.enter_context(_Progress([source.size for source in sources], quiet))
        for number, source in enumerate(sources):
            before = int(total[0])
            stream = pieces(source.lines())
            while batch := list(islice(stream, BATCH)):
                _write_batch(batch, tokenizer, separator, dtype, total, token_file, document_file, count_file)
                progress.update(number, source.name, batch[-1].done)
            if total[0] == before:
                raise InputError(f"{source.name} is empty: it holds no text to read; leave it out or fill it")
    seconds = time.perf_counter() - began
    tokens, words, line_ends, size = (int(value) for value in total)
    names = ("tokens.bin", "documents.bin", "counts.bin")
    meta = {
        "version": VERSION,
        "sources": [source.name for source in sources],
        "tokenizer": tokenizer.label,
        "fingerprint": tokenizer.fingerprint,
        "separator": separator,
        "dtype": dtype.name,
        "tokens": tokens,
        "words": words,
        "line_ends": line_ends,
        "bytes": size,
        "documents": (folder / "documents.bin").stat().st_size // 8,
        "seconds": round(seconds, 3),
        "files": {name: (folder / name).stat().st_size for name in names},
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")
    if not quiet:
        say(
            f"{sources[0].name}{f' and {len(sources) - 1} more' if len(sources) > 1 else ''}: {tokens:,} tokens from "
            f"{size / 1e6:,.1f} MB of text in {seconds:.1f} s ({size / 1e6 / seconds:,.1f} MB/s)"
        )


def _write_batch(
    batch: list[Piece], tokenizer: TextTokenizer, separator: bool, dtype: DTypeLike, total: NDArray[np.int64],
    token_file: BinaryIO, document_file: BinaryIO, count_file: BinaryIO,
) -> None:  # fmt: skip
    """Append the batch's tokens and counts; `total` runs along."""
    parts, starts, counts = [], [], []
    for piece, ids in zip(batch, tokenizer.encode_batch([piece.text for piece in batch]), strict=True):
        if piece.starts_document:
            starts.append(int(total[0]))
            if separator:
                parts.append(np.array([tokenizer.end_id], dtype=dtype))
                total[0] += 1
        parts.append(ids.astype(dtype, copy=False))
        total += (len(ids), len(piece.text.split()), piece.text.count("\n"), len(piece.text.encode("utf-8")))
        counts.append(total.copy())
    # Not `tofile`, whose error on a full disk does not say that the disk is full.
    token_file.write(np.concatenate(parts).data)
    document_file.write(np.array(starts, dtype=np.int64).data)
    count_file.write(np.stack(counts).data)


# Folders that are whole or absent -------------------------------------------------------------------------------


def cached_folder(
    path: Path,
    build: Callable[[Path], None],
    what: str,
    is_whole: Callable[[Path], bool] = lambda folder: True,
    quiet: bool = False,
) -> Path:
    """`path`, built by `build(folder)` if it is not there; one process at a time builds, the others wait for it."""
    if path.is_dir() and is_whole(path):
        return path
    make_folder(path.parent, ELSEWHERE)

    def on_wait() -> None:
        if not quiet:
            say(f"waiting for another process that makes the {what}")

    try:
        with lock(path.with_name(f".lock-{path.name}"), on_wait):
            if not (path.is_dir() and is_whole(path)):  # or damaged from outside: we rename it only when whole
                write_folder(path, build)
    except OSError as error:
        reason = full_reason(error)
        if reason:
            raise RunError(
                f"{reason}, so the {what} could not be cached in {path.parent}; nothing half was left; "
                f"make room, or {ELSEWHERE}"
            ) from error
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
            raise RunError(f"the cache {path.parent} cannot be written ({error.strerror}); {ELSEWHERE}") from error
        raise
    return path


def write_json(path: Path, value: object) -> None:
    """Write the file aside under a name unique to this process and rename it; does nothing if it cannot be written."""
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(json.dumps(value), encoding="utf-8")
        os.replace(aside, path)
    except OSError:
        with suppress(OSError):
            aside.unlink()


# What a person sees ---------------------------------------------------------------------------------------------


class _Progress:
    """A bar over all sources on a terminal; nothing in a pipe, where one line at the end reports the speed."""

    def __init__(self, sizes: Sequence[int], quiet: bool) -> None:
        self.before = [sum(sizes[:number]) for number in range(len(sizes))]
        self.bar = ProgressBar(quiet=quiet)
        self.bar.start("tokenising", total=max(1, sum(sizes)))

    def __enter__(self) -> _Progress:
        self.bar.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.__exit__(*error)

    def update(self, number: int, name: str, done: int) -> None:
        self.bar.update(completed=self.before[number] + done, title=f"tokenising {Path(name).name}")
