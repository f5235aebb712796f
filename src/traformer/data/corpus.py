"""A corpus by name or path, and its splits.

A name of HUB is loaded with `datasets`; python-stdlib is the built-in text (`python_stdlib`). A folder is read with all
its .txt, .text, .raw, .tokens and .parquet files, in order of their paths; files with train, valid (or validation, dev)
or test as a word of their name are that split, all others are training text. Without a validation file the last
HELD_OUT of the training text is validation text and is not trained on.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from traformer.data import python_stdlib
from traformer.data.hub import quiet_access
from traformer.data.sources import HubSplit, ParquetFile, Source, TextFile, WikiTextFile, _import
from traformer.errors import InputError, first_line, unknown_name
from traformer.types import JsonObject

if TYPE_CHECKING:
    from traformer.data.cache import TokenizedText
    from traformer.data.tokenizers import TextTokenizer

# name -> (repository on the hub, configuration)
HUB = {
    "wikitext-103": ("Salesforce/wikitext", "wikitext-103-v1"),
    "wikitext-103-raw": ("Salesforce/wikitext", "wikitext-103-raw-v1"),
    "wikitext-2": ("Salesforce/wikitext", "wikitext-2-v1"),
    "wikitext-2-raw": ("Salesforce/wikitext", "wikitext-2-raw-v1"),
}
KINDS: dict[str, type[TextFile] | type[ParquetFile]] = {
    ".txt": TextFile,
    ".text": TextFile,
    ".raw": WikiTextFile,
    ".tokens": WikiTextFile,
    ".parquet": ParquetFile,
}
SPLITS = ("train", "validation", "test", "all")
HELD_OUT = 0.05
_SPLIT_WORD = re.compile(r"(?<![a-z])(train|valid|validation|dev|test)(?![a-z])")
_SPLIT_OF = {"train": "train", "valid": "validation", "validation": "validation", "dev": "validation", "test": "test"}


NAMES = (*HUB, python_stdlib.NAME)
DEFAULT_NOTE = (
    f"no data was named, so the text is {python_stdlib.version_name()}, the sources of this Python's standard library; "
    "name another with --task-option data=FOLDER or data=wikitext-103"
)


def resolve(places: Sequence[str]) -> tuple[str, ...]:
    """Places as a run stores them, so that they mean the same from any folder: paths absolute, names with versions.

    Without a place, the built-in text.
    """
    return tuple(_resolve(place) for place in places) or (python_stdlib.version_name(),)


def checked_places(data: object) -> tuple[str, ...]:
    """A task's setting `data`, one place or several, as `resolve` gives them; nothing stays nothing."""
    places = (data,) if isinstance(data, str) else data
    listed = tuple(places) if isinstance(places, Iterable) else (places,)
    named = tuple(place for place in listed if isinstance(place, str))
    if len(named) < len(listed):
        raise InputError(f"data must be a path, a name or a list of these, not {data!r}")
    return resolve(named) if named else ()


def _resolve(place: str) -> str:
    if not place.strip():
        raise InputError(f"data holds an empty name; give a file, a folder, or one of {', '.join(NAMES)}")
    path = Path(place).expanduser()
    if path.exists():
        return os.path.abspath(path)
    return python_stdlib.version_name() if place == python_stdlib.NAME else place


class Corpus:
    """The sources of every split, found but not read."""

    def __init__(self, places: Sequence[str] = ()) -> None:
        self.places = resolve(places)
        self.sources: dict[str, list[Source]] = {}
        for place in self.places:
            for split, source in _find(place):
                self.sources.setdefault(split, []).append(source)

    @property
    def name(self) -> str:
        return ", ".join(self.places)

    @property
    def holds_out(self) -> bool:
        """Whether the validation text is the tail of the training text."""
        return "validation" not in self.sources and "train" in self.sources

    def splits(self) -> list[str]:
        """Those that can be opened, "all" not counted."""
        return [split for split in SPLITS if split in self.sources or (split == "validation" and self.holds_out)]

    def describe(self, split: str) -> str:
        """What a split is, for the protocol of a result."""
        if split == "validation" and self.holds_out:
            return f"validation (the last {100 * HELD_OUT:g} % of the training text)"
        return split

    def open(self, split: str, tokenizer: TextTokenizer, separator: bool = False, quiet: bool = False) -> TokenizedText:
        """The tokens of a split, made now if they are not in the cache."""
        from traformer.data.cache import tokenize

        if split not in SPLITS:
            raise unknown_name("split", split, SPLITS)
        if split == "all":
            return tokenize([source for part in self.sources.values() for source in part], tokenizer, separator, quiet)
        if split not in self.splits():
            raise InputError(f"{self.name} has no {split} split; it has: {', '.join([*self.splits(), 'all'])}")
        if self.holds_out and split != "test":
            both = tokenize(self.sources["train"], tokenizer, separator, quiet).split_tail(HELD_OUT)
            return both[split == "validation"]
        return tokenize(self.sources[split], tokenizer, separator, quiet)

    @cached_property
    def training_text(self) -> list[Source]:
        """What a tokenizer may be trained on."""
        return self.sources.get("train", [])


def _find(place: str) -> list[tuple[str, Source]]:
    path = Path(place).expanduser()
    if path.is_dir():
        files = sorted(
            file
            for file in path.rglob("*")
            if file.suffix.lower() in KINDS and file.is_file() and not file.name.startswith(".")
        )
        if not files:
            raise InputError(f"the folder {place} holds no text; it needs files that end in {', '.join(KINDS)}")
        return [(split_of(file), _open_file(file)) for file in files]
    if path.exists():
        if path.suffix.lower() not in KINDS:
            raise InputError(f"{place} is not a kind of file that is read as text; it must end in {', '.join(KINDS)}")
        return [(split_of(path), _open_file(path))]
    if place in HUB:
        return [(split, HubSplit(f"{place} {split}", rows)) for split, rows in _load_hub(place).items()]
    if python_stdlib.is_stdlib(place):
        return python_stdlib.sources(place)
    where = "" if path.is_absolute() else f" (looked for in {Path.cwd()})"
    raise InputError(f"data {place!r} is neither a file, nor a folder{where}, nor one of {', '.join(NAMES)}")


def _open_file(path: Path) -> Source:
    if path.stat().st_size == 0:
        raise InputError(f"{path} is empty: it holds no text to read; leave it out or fill it")
    return KINDS[path.suffix.lower()](path)


def split_of(path: Path) -> str:
    found = _SPLIT_WORD.search(path.name.lower())
    return _SPLIT_OF[found[1]] if found else "train"


def _load_hub(name: str) -> JsonObject:
    repository, configuration = HUB[name]
    datasets = _import("datasets", "a dataset of the hub", name)
    datasets.disable_progress_bars()
    with quiet_access() as online:
        try:
            return dict(datasets.load_dataset(repository, configuration))
        except Exception as error:
            reason = first_line(error) if online else "there is no network, and no copy in its cache"
            raise InputError(
                f"the dataset {name} ({repository}, {configuration}) could not be loaded from the Hugging Face hub "
                f"({reason}); give data=FOLDER with a local copy, its .tokens, .txt or .parquet files, or "
                f"data={python_stdlib.NAME}, which needs no network"
            ) from None
