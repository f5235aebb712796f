"""copy: repeat a string, symbol by symbol, and stop."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from traformer.errors import InputError, unknown_name
from traformer.tasks import rng
from traformer.tasks.base import Arrays, StringTask
from traformer.tasks.checks import check_count, store
from traformer.tasks.lengths import draw_lengths
from traformer.tasks.tokens import BOS, EOS, FIRST_SYMBOL, NO_SOURCE, PAD, SEP, SPECIAL_TOKENS, symbol_names

ALPHABETS = ("unique", "letters", "binary")
_SYMBOLS = {"letters": 26, "binary": 2}

# Default vocabulary of `unique`: the paper's longest test, or 8 times the trained length where that is more.
_LONGEST_TEST = 300
_LONGEST_TEST_FACTOR = 8

_LENGTH_DRAW, _SYMBOL_DRAW = range(2)


@dataclasses.dataclass(frozen=True)
class Copy(StringTask):
    """`<bos> x1..xn <sep> x1..xn <eos>`, n uniform; the second string and `<eos>` are scored.

    Alphabets: `unique` draws from `vocabulary` symbols without repetition (at least as many as the longest test has,
    since a model's vocabulary is fixed when it is trained), `letters` from 26 and `binary` from 2 with repetition.
    """

    alphabet: str = "unique"
    max_length: int = 50
    min_length: int = 1
    vocabulary: int | None = None

    name: ClassVar[str] = "copy"
    label: ClassVar[str] = "Copy"
    guess: ClassVar[str] = "the right number of symbols in a random order"
    stream: ClassVar[int | None] = 2
    test_ranges: ClassVar[int] = 6

    def __post_init__(self) -> None:
        if self.alphabet not in ALPHABETS:
            raise unknown_name("alphabet", self.alphabet, ALPHABETS)
        self.check_lengths()
        high = self.max_length
        if self.alphabet != "unique":
            if self.vocabulary is not None:
                raise InputError(f"vocabulary is for alphabet 'unique'; leave it out with alphabet {self.alphabet!r}")
            return
        if self.vocabulary is None:
            store(self, vocabulary=max(_LONGEST_TEST, _LONGEST_TEST_FACTOR * high))
        symbols = check_count("vocabulary", self.vocabulary, 1, "there must be a symbol to copy")
        if symbols < high:
            raise InputError(
                f"vocabulary {symbols} is too small for {high} unique symbols; train with a vocabulary of at least "
                f"{high}, or keep to lengths up to {symbols}"
            )
        store(self, vocabulary=symbols)

    @property
    def symbols(self) -> int:
        """Number of symbols to draw from."""
        return _SYMBOLS[self.alphabet] if self.vocabulary is None else self.vocabulary

    def _token_names(self) -> tuple[str, ...]:
        return SPECIAL_TOKENS + (("0", "1") if self.alphabet == "binary" else symbol_names(self.symbols))

    @property
    def sequence_length(self) -> int:
        return 2 * self.max_length + 3

    def _stream(self) -> tuple[int, ...]:
        return (self.min_length, self.max_length, ALPHABETS.index(self.alphabet), self.symbols)

    def default_test_lengths(self) -> list[tuple[int, int]]:
        """As for every string; with unique symbols, ranges that the vocabulary cannot fill are left out."""
        return [pair for pair in super().default_test_lengths() if self.alphabet != "unique" or pair[1] <= self.symbols]

    def chance(self, metric: str = "exact_match") -> float | None:
        """Of the copied symbols in a random order (for `letters` and `binary`: of any symbols), with the end known."""
        lengths = range(self.min_length, self.max_length + 1)
        if metric != "exact_match":
            return sum(((1.0 if self.alphabet == "unique" else n / self.symbols) + 1) / (n + 1) for n in lengths) / len(
                lengths
            )
        if self.alphabet == "unique":
            return sum(math.exp(-math.lgamma(n + 1)) for n in lengths) / len(lengths)
        return sum(float(self.symbols) ** -n for n in lengths) / len(lengths)

    def _generate(self, keys: rng.Words) -> Arrays:
        length = draw_lengths(keys, _LENGTH_DRAW, self.min_length, self.max_length)[:, None]  # [n, 1]
        longest = int(length.max())
        if self.alphabet == "unique":
            symbols = draw_unique(keys, _SYMBOL_DRAW, self.symbols, longest)  # [n, longest]
        else:
            symbols = rng.below(rng.draw_row(keys, _SYMBOL_DRAW, longest), self.symbols)

        position = np.arange(2 * longest + 3)  # [T]
        copied = (position > length + 1) & (position < 2 * length + 2)
        # Where each token's symbol is in the first string: in that string itself, at its own position.
        source = np.where(copied, position - length - 1, position)  # [n, T]
        within = np.clip(source - 1, 0, longest - 1)
        input_ids = np.take_along_axis(symbols, within, axis=1) + FIRST_SYMBOL
        input_ids[:, 0] = BOS
        np.copyto(input_ids, SEP, where=position == length + 1)
        ends = position == 2 * length + 2
        np.copyto(input_ids, EOS, where=ends)
        np.copyto(input_ids, PAD, where=position > 2 * length + 2)
        return Arrays(input_ids, copied | ends, np.where(copied, source, NO_SOURCE), 2 * length[:, 0] + 3)


def draw_unique(keys: rng.Words, purpose: int, symbols: int, count: int) -> NDArray[np.int64]:
    """The first `count` of a random order of 0 .. symbols - 1, per example; [n, count].

    Every symbol gets a random sort key whose lowest bits are the symbol itself: no ties, and sorting gives the order.
    """
    low_bits = np.uint64((1 << (symbols - 1).bit_length()) - 1)
    order = rng.draw_row(keys, purpose, symbols)
    order &= ~low_bits
    order |= np.arange(symbols, dtype=np.uint64)
    if count < symbols:
        order = np.partition(order, count - 1, axis=1)[:, :count]
    return (np.sort(order, axis=1) & low_bits).astype(np.int64)
