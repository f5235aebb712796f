"""Tokenizers by name.

bytes     UTF-8 bytes; needs nothing, and is the default
FOLDER    with GPT-2's encoder.json and vocab.bpe (or vocab.json and merges.txt), or with a tokenizer.json
bpe:8192  byte-level BPE of that many entries, trained on the corpus's training text
NAME      any tokenizer of the Hugging Face hub, such as gpt2
"""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from traformer.data.cache import cache_folder, cached_folder
from traformer.data.hub import quiet_access
from traformer.data.pieces import pieces
from traformer.errors import InputError, RunError, first_line

if TYPE_CHECKING:
    from traformer.data.sources import Source

BYTES = "bytes"
END = "<|endoftext|>"
BPE_VERSION = 1
_BPE = re.compile(r"bpe:(\d+)(k?)", re.IGNORECASE)
_GPT2_FILES = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))


class TextTokenizer(ABC):
    """Text to ids and back."""

    label: str  # what it is called in results
    vocab_size: int
    end_id: int | None  # of the mark between documents, None if it has none
    fingerprint: str  # equal where every text has the same ids

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        """The ids of each text, on all cores; no special tokens are added."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids; bytes that are no whole character become U+FFFD."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write what `load_tokenizer(str(folder))` reads back."""

    def encode(self, text: str) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:  # Python keeps bytes of the command line that are not UTF-8 as lone surrogates
            raise InputError("the text holds bytes that are not UTF-8, so it has no tokens; give it in UTF-8") from None
        return self.encode_batch([text])[0].tolist()


class ByteTokenizer(TextTokenizer):
    """A byte is a token; 256 marks the end of a document."""

    label, vocab_size, end_id, fingerprint = BYTES, 257, 256, "bytes 1"

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        parts: list[bytes] = []
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise InputError(f"ids holds {token}, but bytes have token ids 0 to {self.vocab_size - 1} only")
            parts.append(END.encode() if token == self.end_id else bytes([token]))
        return b"".join(parts).decode("utf-8", errors="replace")

    def save(self, folder: Path) -> None:
        (folder / "bytes.json").write_text('{"tokenizer": "bytes"}\n', encoding="utf-8")


class FastTokenizer(TextTokenizer):
    """Any tokenizer of the `tokenizers` library."""

    def __init__(self, backend: Any, label: str) -> None:
        backend.no_padding()
        backend.no_truncation()
        self.backend, self.label = backend, label
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        self.end_id = next(
            (found for mark in (END, "</s>", "<eos>", "[SEP]") if (found := backend.token_to_id(mark)) is not None),
            None,
        )
        # Through a parsed form, so that white space and the order of names do not count.
        canonical = json.dumps(json.loads(backend.to_str()), sort_keys=True)
        self.fingerprint = hashlib.sha256(canonical.encode()).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.integer]]:
        encode = getattr(self.backend, "encode_batch_fast", self.backend.encode_batch)
        return [np.array(found.ids, dtype=np.uint32) for found in encode(list(texts), add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        tokens = list(ids)
        for token in tokens:
            if not 0 <= token < self.vocab_size:
                raise InputError(f"ids holds {token}, but {self.label} has token ids 0 to {self.vocab_size - 1} only")
        return self.backend.decode(tokens, skip_special_tokens=False)

    def save(self, folder: Path) -> None:
        self.backend.save(str(folder / "tokenizer.json"))


def load_tokenizer(name: str, training_text: Sequence[Source] | None = None) -> TextTokenizer:
    """The tokenizer of that name; `training_text` is what `bpe:N` is trained on."""
    if not isinstance(name, str) or not name:
        raise InputError(f"tokenizer must be a name or a folder, not {name!r}")
    if name == BYTES:
        return ByteTokenizer()
    if (size := bpe_size(name)) is not None:
        return _trained_bpe(size, training_text)
    path = Path(name).expanduser()
    if path.exists():
        return _from_path(path)
    if name.startswith("bpe"):
        raise InputError(f"tokenizer {name!r} is not of the form bpe:8192 (a byte-level BPE with that many entries)")
    return _from_hub(name)


def bpe_size(name: str) -> int | None:
    """Entries of `bpe:8192` or `bpe:8k`; None for any other name."""
    found = _BPE.fullmatch(name)
    return int(found[1]) * (1024 if found[2] else 1) if found else None


def _from_path(path: Path) -> TextTokenizer:
    from tokenizers import Tokenizer

    folder = path if path.is_dir() else path.parent
    if (folder / "bytes.json").is_file():
        return ByteTokenizer()
    whole = path if path.is_file() else folder / "tokenizer.json"
    try:
        if whole.is_file():
            return FastTokenizer(Tokenizer.from_file(str(whole)), str(path))
        for vocabulary, merges in _GPT2_FILES:
            if (folder / vocabulary).is_file() and (folder / merges).is_file():
                return FastTokenizer(_byte_level_bpe(folder / vocabulary, folder / merges), "gpt2")
    except Exception as error:  # the library raises plain Exception
        raise InputError(f"the tokenizer files in {folder} cannot be read: {first_line(error)}") from None
    raise InputError(
        f"the folder {folder} holds no tokenizer; give one with tokenizer.json, or GPT-2's encoder.json and vocab.bpe "
        "(or vocab.json and merges.txt)"
    )


def _byte_level_bpe(vocabulary: Path | None = None, merges: Path | None = None) -> Any:
    """GPT-2's kind of tokenizer, with its entries or with none yet."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    model = models.BPE() if vocabulary is None else models.BPE.from_file(str(vocabulary), str(merges))
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if vocabulary is not None and model.token_to_id(END) is not None:
        tokenizer.add_special_tokens([AddedToken(END, special=True)])
    return tokenizer


def _from_hub(name: str) -> TextTokenizer:
    from transformers import AutoTokenizer

    with quiet_access() as online:
        try:
            found = AutoTokenizer.from_pretrained(name)
        except Exception as error:
            reason = first_line(error) if online else "there is no network, and no copy in its cache"
            raise InputError(
                f"the tokenizer {name!r} is neither a folder nor could it be loaded from the Hugging Face hub "
                f"({reason}); give 'bytes', 'bpe:8192', or a folder with its files"
            ) from None
    backend = getattr(found, "backend_tokenizer", None)
    if backend is None:
        raise InputError(f"the tokenizer {name!r} has no fast version (tokenizer.json); give one that has")
    return FastTokenizer(backend, name)


def _trained_bpe(size: int, training_text: Sequence[Source] | None) -> TextTokenizer:
    """Trained once for a corpus and a size, then kept in the cache."""
    if size < 257:
        raise InputError(f"tokenizer bpe:{size} is too small; 256 bytes and the end mark need at least bpe:257")
    if not training_text:
        raise InputError(
            f"tokenizer bpe:{size} is trained on the corpus, but it has no training text; name another one"
        )
    content = [source.content_hash() for source in training_text]
    key = hashlib.sha256(json.dumps(["bpe", BPE_VERSION, size, content]).encode()).hexdigest()[:32]

    def build(folder: Path) -> None:
        from tokenizers import pre_tokenizers, trainers

        tokenizer = _byte_level_bpe()
        trainer = trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=[END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(_texts(training_text), trainer)
        found = tokenizer.get_vocab_size()
        if found < size:
            raise InputError(
                f"the corpus is too small for bpe:{size}: it gives {found} entries; give bpe:{found} or less"
            )
        tokenizer.save(str(folder / "tokenizer.json"))

    folder = cached_folder(cache_folder() / "tokenizers" / key, build, f"tokenizer bpe:{size}", _is_readable)
    loaded = _from_path(folder)
    loaded.label = f"bpe:{size}"
    return loaded


def _is_readable(folder: Path) -> bool:
    """Whether a cached tokenizer is whole; a damaged one is made again."""
    try:
        _from_path(folder)
    except InputError:
        return False
    return True


def _texts(sources: Sequence[Source]) -> Iterator[str]:
    for source in sources:
        for piece in pieces(source.lines()):
            yield piece.text


def check_same(tokenizer: TextTokenizer, saved_in: Path) -> None:
    """Raise the sentence if a run was trained with another tokenizer than this one."""
    try:
        saved = load_tokenizer(str(saved_in))
    except InputError as error:
        raise RunError(f"the run's own tokenizer cannot be read: {error}") from None
    if saved.fingerprint != tokenizer.fingerprint:
        raise RunError(
            f"the tokenizer {tokenizer.label!r} is not the one the run was trained with, which is kept in {saved_in}; "
            f"give tokenizer={saved_in}, or train another run"
        )
