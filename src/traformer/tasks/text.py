"""Language modelling: windows of a corpus, every token but the first of a window scored."""

from __future__ import annotations

import dataclasses
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from traformer.data.corpus import DEFAULT_NOTE, checked_places, resolve
from traformer.errors import InputError, RunError
from traformer.tasks import rng
from traformer.tasks.base import TEST_STREAM, Arrays, Batch, Split, Task, TokenIds, check_lengths, token_list
from traformer.tasks.checks import store
from traformer.tasks.lengths import length_label
from traformer.tasks.tokens import NO_SOURCE
from traformer.types import JsonObject, Options

if TYPE_CHECKING:
    from traformer.data import Corpus, TextTokenizer, TokenizedText

TOKENIZER_FOLDER = "tokenizer"  # within a run folder
_PHASE_DRAW, _ORDER_DRAW = range(2)
_ROUNDS = 4  # of the Feistel network


@dataclasses.dataclass(frozen=True)
class Text(Task):
    """The next token of real text, in windows of `length` tokens.

    data        a file, a folder or a name such as wikitext-103, or a list of these (see traformer.data.corpus); without
                any, the built-in python-stdlib: the sources of this Python's standard library
    tokenizer   bytes, a folder with GPT-2's files or a tokenizer.json, bpe:8192 (trained on the corpus), or a hub name
    separator   start every document with the tokenizer's end-of-text token

    Training cuts the text into windows that do not overlap, at a new place every epoch, and takes each once an epoch in
    an order of its own; (seed, index) still names one window at once. Test seeds draw from the validation split.
    """

    data: tuple[str, ...] = ()
    tokenizer: str = "bytes"
    length: int = 128
    separator: bool = False

    name: ClassVar[str] = "text"
    label: ClassVar[str] = "Text"
    metrics: ClassVar[tuple[str, ...]] = (
        "perplexity", "word_perplexity", "bits_per_byte", "loss_by_place", "loss_by_recurrence",
    )  # fmt: skip
    evaluator: ClassVar[str] = "perplexity"
    stream: ClassVar[int | None] = 5
    length_unit: ClassVar[str] = "tokens"
    length_setting: ClassVar[str] = "length"
    shortest: ClassVar[int] = 2
    pad_id: ClassVar[int | None] = None  # type: ignore[assignment]  # windows are full: nothing is ever padded

    def __post_init__(self) -> None:
        store(self, data=checked_places(self.data) or resolve(()))
        if not isinstance(self.separator, bool):
            raise InputError(f"separator must be true or false, not {self.separator!r}")
        if not isinstance(self.tokenizer, str):
            raise InputError(f"tokenizer must be a name or a folder, not {self.tokenizer!r}")
        _, length = check_lengths(self, "length", self.length, "length", self.length)
        store(self, length=length)

    @classmethod
    def notice(cls, options: Options) -> str | None:
        return None if options.get("data") else DEFAULT_NOTE

    @classmethod
    def stored_options(cls, options: Options) -> JsonObject:
        stored = {**options, "data": list(checked_places(options.get("data", ())) or resolve(()))}
        if "tokenizer" in options:
            stored["tokenizer"] = _absolute(options["tokenizer"])
        return stored

    # The text -------------------------------------------------------------------------------------------------

    @cached_property
    def corpus(self) -> Corpus:
        from traformer.data import Corpus

        return Corpus(self.data)

    @cached_property
    def text_tokenizer(self) -> TextTokenizer:
        from traformer.data import bpe_size, load_tokenizer

        is_trained = bpe_size(self.tokenizer) is not None
        return load_tokenizer(self.tokenizer, self.corpus.training_text if is_trained else None)

    def open(self, split: str) -> TokenizedText:
        """The tokens of a split, from the cache; the first call makes them."""
        if split not in self._opened:
            self._opened[split] = self.corpus.open(split, self.text_tokenizer, self.separator)
        return self._opened[split]

    @cached_property
    def _opened(self) -> dict[str, TokenizedText]:
        return {}

    def prepare(self) -> None:
        """Tokenise the training text and check that a window fits, before a run folder is made."""
        self.check_window(self.open("train"), "train")

    def check_window(self, text: TokenizedText, split: str) -> None:
        if self.length > len(text):
            raise InputError(
                f"the window of {self.length:,} tokens is longer than the text: the {split} split of "
                f"{self.corpus.name} has {len(text):,} tokens; give a shorter length or more text"
            )

    def write_files(self, folder: Path) -> None:
        """Keep the tokenizer with the run."""
        (folder / TOKENIZER_FOLDER).mkdir(exist_ok=True)
        self.text_tokenizer.save(folder / TOKENIZER_FOLDER)

    def use_files(self, folder: Path) -> None:
        """A tokenizer that was trained for the run, or came from a folder that is gone, is the run's own copy."""
        from traformer.data import bpe_size, load_tokenizer

        size = bpe_size(self.tokenizer)
        is_gone = Path(self.tokenizer).is_absolute() and not Path(self.tokenizer).exists()
        if (size is None and not is_gone) or "text_tokenizer" in self.__dict__:
            return
        try:
            kept = load_tokenizer(str(folder / TOKENIZER_FOLDER))
        except InputError:
            return  # `check_files` says what is wrong with it
        if size in (None, kept.vocab_size):
            kept.label = self.tokenizer
            self.__dict__["text_tokenizer"] = kept

    def check_files(self, folder: Path) -> None:
        """Refuse another tokenizer than the run was trained with."""
        from traformer.data.tokenizers import check_same

        if not (folder / TOKENIZER_FOLDER).is_dir():
            if not (folder / "checkpoints").exists():  # the run was stopped before it had written anything
                return self.write_files(folder)
            raise RunError(f"{folder} has lost its folder {TOKENIZER_FOLDER}, so its tokens cannot be read; restore it")
        check_same(self.text_tokenizer, folder / TOKENIZER_FOLDER)

    # Windows --------------------------------------------------------------------------------------------------

    @property
    def vocab_size(self) -> int:
        return self.text_tokenizer.vocab_size

    def _token_names(self) -> tuple[str, ...]:
        return tuple(self.text_tokenizer.decode([token]) for token in range(self.vocab_size))

    @property
    def sequence_length(self) -> int:
        return self.length

    @property
    def length_range(self) -> tuple[int, int]:
        return self.length, self.length

    def _stream(self) -> tuple[int, ...]:
        return (self.length,)

    def at_length(self, shortest: int, longest: int) -> Text:
        if shortest != longest:
            raise InputError(
                f"lengths has the range {shortest}-{longest}; windows of text have one length, such as {longest}"
            )
        other = dataclasses.replace(self, length=longest)
        for name in ("corpus", "text_tokenizer", "_opened"):  # shared, so that nothing is opened twice
            if name in self.__dict__:
                other.__dict__[name] = self.__dict__[name]
        return other

    def default_test_lengths(self) -> list[tuple[int, int]]:
        """The trained window and 2, 4, ... 32 times it."""
        return [(self.length << power, self.length << power) for power in range(6)]

    def _splits_at(self, low: int, high: int) -> list[Split]:
        return [Split("validation", length_label(low, high), self.at_length(low, high))]

    def _draw(self, seed: int, start: int, count: int) -> Arrays:
        split = "validation" if seed >= TEST_STREAM else "train"
        text = self.open(split)
        self.check_window(text, split)
        first = window_starts(len(text), self.length, self.stream_key(seed), start, count)
        input_ids = text.tokens[first[:, None] + np.arange(self.length)].astype(np.int64)  # [n, T]
        answers = np.ones_like(input_ids, dtype=bool)
        answers[:, 0] = False
        return Arrays(input_ids, answers, np.full_like(input_ids, NO_SOURCE), np.full(count, self.length))

    # Text -----------------------------------------------------------------------------------------------------

    @property
    def end_id(self) -> int | None:
        return self.text_tokenizer.end_id

    def encode(self, text: str) -> list[int]:
        return self.text_tokenizer.encode(text)

    def decode(self, ids: TokenIds) -> str:
        """The text of some ids; an entry that a converted model has beyond its tokenizer's becomes U+FFFD."""
        known = self.text_tokenizer
        parts = groupby(token_list(ids), lambda token: token >= known.vocab_size)
        return "".join("\ufffd" * len(list(part)) if beyond else known.decode(part) for beyond, part in parts)

    def format(self, batch: Batch, row: int, markup: bool = False) -> str:
        """The window's text; all of it but the first token is scored, so nothing is marked."""
        text = self.decode(batch.input_ids[row])
        if markup:
            from rich.markup import escape

            return escape(text)
        return text


def _absolute(tokenizer: object) -> object:
    """A tokenizer's folder as an absolute path; names such as bytes and gpt2 as they are."""
    if not isinstance(tokenizer, str) or tokenizer in ("", "bytes"):
        return tokenizer
    path = Path(tokenizer).expanduser()
    return str(path.absolute()) if path.exists() else tokenizer


def window_starts(tokens: int, length: int, key: int, start: int, count: int) -> NDArray[np.int64]:
    """Where windows start .. start + count - 1 of a stream begin in a text of `tokens` tokens; [count].

    An epoch has as many windows as fit side by side wherever the first one starts; that place, the phase, is drawn for
    every epoch, and the order of the windows is a permutation with random access.
    """
    windows = max(1, (tokens - length + 1) // length)
    phases = min(length, tokens - windows * length + 1)
    index = np.arange(start, start + count, dtype=np.int64)
    epoch, place = index // windows, index % windows
    starts = np.empty(count, dtype=np.int64)
    for number in np.unique(epoch):
        epoch_key = rng.example_keys(key, int(number), 1)
        phase = int(rng.below(rng.draw(epoch_key, _PHASE_DRAW), phases)[0])
        inside = epoch == number
        order = permuted(place[inside], windows, int(rng.draw(epoch_key, _ORDER_DRAW)[0]))
        starts[inside] = phase + order * length
    return starts


def permuted(places: NDArray[np.int64], size: int, key: int) -> NDArray[np.int64]:
    """The images of some places under a permutation of 0 .. size - 1 that the key chooses.

    A Feistel network permutes the numbers of an even number of bits; places that it sends beyond the end are sent on
    until they fall inside.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    words = places.astype(np.uint64)
    outside = np.ones(len(words), dtype=bool)
    while outside.any():
        left, right = words[outside] >> np.uint64(half), words[outside] & mask
        for number in range(_ROUNDS):
            round_key = np.uint64(rng.mix_int(key + number))
            left, right = right, left ^ (rng.mix(right ^ round_key) & mask)
        words[outside] = (left << np.uint64(half)) | right
        outside[outside] = words[outside] >= size
    return words.astype(np.int64)
