"""algorithmic: the small problems of the length-generalisation literature, as strings with an answer."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from traformer.errors import unknown_name
from traformer.tasks import rng
from traformer.tasks.base import (
    BOS,
    EOS,
    NO_SOURCE,
    PAD,
    SEP,
    SPECIAL_TOKENS,
    Arrays,
    Task,
    buckets,
    check_lengths,
    draw_lengths,
    store,
    symbol_names,
)

FIRST_SYMBOL = len(SPECIAL_TOKENS)
MODULUS = 5  # of modular arithmetic, and the places of the cycle
LETTERS = 10  # of reverse and sort
DIGITS = tuple(str(digit) for digit in range(MODULUS))
# Problem -> the names of its symbols. The order fixes the ids.
SYMBOLS: dict[str, tuple[str, ...]] = {
    "parity": ("0", "1"),
    "majority": ("0", "1"),
    "cycle_navigation": (*DIGITS, "stay", "right", "left"),
    "modular_arithmetic": (*DIGITS, "+", "-", "*"),
    "reverse": symbol_names(LETTERS),
    "sort": symbol_names(LETTERS),
    "stack": ("0", "1", "pop", "push0", "push1"),
}
PROBLEMS = tuple(SYMBOLS)
STAY, RIGHT, LEFT = range(MODULUS, MODULUS + 3)
PLUS, MINUS, TIMES = range(MODULUS, MODULUS + 3)
POP, PUSH_ZERO, PUSH_ONE = range(2, 5)

_LENGTH_DRAW, _STRING_DRAW = range(2)
Strings = NDArray[np.int64]  # [n, longest]
Lengths = NDArray[np.int64]  # [n]


@dataclasses.dataclass(frozen=True)
class Algorithmic(Task):
    """`<bos> x <sep> y <eos>`: y is the answer to x and is scored with `<eos>`; the length is that of x.

    problem   parity (of the ones) | majority (the commoner bit, 0 if neither is) | cycle_navigation (the place on a
              cycle of 5 after steps from place 0) | modular_arithmetic (the value modulo 5 of a term of + - * with the
              usual precedence; an even length is one shorter) | reverse | sort | stack (the first half of x are bits,
              the last on top, the other half pushes and pops; y is the stack that is left, from the top)
    """

    problem: str = "parity"
    max_length: int = 50
    min_length: int = 1

    name: ClassVar[str] = "algorithmic"
    label: ClassVar[str] = "Algorithmic"
    guess: ClassVar[str] = "one of the possible answers at random"

    def __post_init__(self) -> None:
        if self.problem not in SYMBOLS:
            raise unknown_name("problem", self.problem, PROBLEMS)
        low, high = check_lengths(self, "min_length", self.min_length, "max_length", self.max_length)
        store(self, min_length=low, max_length=high)

    def _token_names(self) -> tuple[str, ...]:
        return SPECIAL_TOKENS + SYMBOLS[self.problem]

    @property
    def sequence_length(self) -> int:
        return self.max_length + 3 + self._longest_answer(self.max_length)

    def _longest_answer(self, length: int) -> int:
        return length if self.problem in ("reverse", "sort", "stack") else 1

    @property
    def length_range(self) -> tuple[int, int]:
        return self.min_length, self.max_length

    def _stream(self) -> tuple[int, ...]:
        return (PROBLEMS.index(self.problem), self.min_length, self.max_length)

    def at_length(self, shortest: int, longest: int) -> Algorithmic:
        return dataclasses.replace(self, min_length=shortest, max_length=longest)

    def default_test_lengths(self) -> list[tuple[int, int]]:
        """The trained lengths, then nine ranges of the same reach: 1-50, 51-100, ..., 451-500."""
        return buckets(self.min_length, self.max_length, 10)

    def chance(self, metric: str = "exact_match") -> float | None:
        """Of one of the possible answers at random, where the answer is one symbol; 0 for longer strings of symbols."""
        if metric != "exact_match":
            return None
        one = {"parity": 1 / 2, "majority": 1 / 2, "cycle_navigation": 1 / MODULUS, "modular_arithmetic": 1 / MODULUS}
        lengths = range(self.min_length, self.max_length + 1)
        if self.problem in one:
            return one[self.problem]
        options = 2.0 if self.problem == "stack" else float(LETTERS)
        return sum(options**-n for n in lengths) / len(lengths)

    def _generate(self, keys: rng.Words) -> Arrays:
        length = draw_lengths(keys, _LENGTH_DRAW, self.min_length, self.max_length)
        words = rng.draw_row(keys, _STRING_DRAW, int(length.max()))  # [n, longest]
        x, length, y, answers = _SOLVE[self.problem](words, length)
        return _sequences(x, length, y, answers, self.problem == "reverse")


def _sequences(x: Strings, length: Lengths, y: Strings, answer: Lengths, is_reverse: bool) -> Arrays:
    n, m = length[:, None], answer[:, None]
    position = np.arange(int((length + answer).max()) + 3)  # [T]
    question = (position >= 1) & (position <= n)
    answered = (position >= n + 2) & (position < n + 2 + m)
    ids = np.full((len(length), len(position)), PAD, dtype=np.int64)
    from_x = np.take_along_axis(x, np.broadcast_to(np.clip(position - 1, 0, x.shape[1] - 1)[None], ids.shape), axis=1)
    from_y = np.take_along_axis(y, np.clip(position - n - 2, 0, y.shape[1] - 1), axis=1)
    np.copyto(ids, from_x + FIRST_SYMBOL, where=question)
    np.copyto(ids, from_y + FIRST_SYMBOL, where=answered)
    ids[:, 0] = BOS
    np.copyto(ids, SEP, where=position == n + 1)
    end = position == n + m + 2
    np.copyto(ids, EOS, where=end)
    sources = np.where(answered, 2 * n + 2 - position, NO_SOURCE) if is_reverse else np.full_like(ids, NO_SOURCE)
    return Arrays(ids, answered | end, sources, length + answer + 3)


# Each solver takes random words [n, longest] and lengths [n]; it returns x, its lengths, y, its lengths. ------------


def _inside(words: rng.Words, length: Lengths) -> NDArray[np.bool_]:
    return np.arange(words.shape[1]) < length[:, None]


def _one(values: NDArray[np.int64]) -> tuple[Strings, Lengths]:
    return values[:, None].astype(np.int64), np.ones(len(values), dtype=np.int64)


def _parity(words: rng.Words, length: Lengths) -> tuple[Strings, Lengths, Strings, Lengths]:
    x = rng.below(words, 2)
    return x, length, *_one((x * _inside(words, length)).sum(axis=1) % 2)


def _majority(words: rng.Words, length: Lengths) -> tuple[Strings, Lengths, Strings, Lengths]:
    x = rng.below(words, 2)
    return x, length, *_one(2 * (x * _inside(words, length)).sum(axis=1) > length)


def _cycle(words: rng.Words, length: Lengths) -> tuple[Strings, Lengths, Strings, Lengths]:
    steps = rng.below(words, 3)  # stay, right, left
    moved = np.where(steps == 2, -1, steps) * _inside(words, length)
    return steps + STAY, length, *_one(moved.sum(axis=1) % MODULUS)


def _arithmetic(words: rng.Words, length: Lengths) -> tuple[Strings, Lengths, Strings, Lengths]:
    length = length - (length % 2 == 0)  # digits and operators in turn, digits at both ends
    is_digit = np.arange(words.shape[1]) % 2 == 0
    x = np.where(is_digit, rng.below(words.copy(), MODULUS), rng.below(words.copy(), 3) + PLUS)
    total = np.zeros(len(length), dtype=np.int64)
    product = x[:, 0].copy()  # with its sign, what is being multiplied
    for at in range(1, words.shape[1] - 1, 2):
        active, operator, digit = at < length, x[:, at], x[:, at + 1]
        times = active & (operator == TIMES)
        added = active & ~times
        total += np.where(added, product, 0)
        product = np.where(times, product * digit, np.where(added, np.where(operator == MINUS, -digit, digit), product))
        product %= MODULUS
    return x, length, *_one((total + product) % MODULUS)


def _reverse(words: rng.Words, length: Lengths) -> tuple[Strings, Lengths, Strings, Lengths]:
    x = rng.below(words, LETTERS)
    place = np.clip(length[:, None] - 1 - np.arange(x.shape[1]), 0, None)
    return x, length, np.take_along_axis(x, place, axis=1), length


def _sort(words: rng.Words, length: Lengths) -> tuple[Strings, Lengths, Strings, Lengths]:
    x = rng.below(words, LETTERS)
    return x, length, np.sort(np.where(_inside(words, length), x, LETTERS), axis=1) % LETTERS, length


def _stack(words: rng.Words, length: Lengths) -> tuple[Strings, Lengths, Strings, Lengths]:
    bits = length - length // 2  # the first half, rounded up
    columns = np.arange(words.shape[1])
    x = np.where(columns < bits[:, None], rng.below(words.copy(), 2), rng.below(words.copy(), 3) + POP)
    stack = np.zeros(x.shape, dtype=np.int64)
    height = np.zeros(len(length), dtype=np.int64)
    rows = np.arange(len(length))
    for at in columns:
        symbol, active = x[:, at], at < length
        pushed = active & (symbol != POP)
        bit = np.where(symbol >= POP, symbol - PUSH_ZERO, symbol)
        stack[rows[pushed], height[pushed]] = bit[pushed]
        height += pushed
        height -= active & (symbol == POP) & (height > 0)
    place = np.clip(height[:, None] - 1 - columns, 0, None)
    return x, length, np.take_along_axis(stack, place, axis=1), height


_SOLVE = {
    "parity": _parity, "majority": _majority, "cycle_navigation": _cycle, "modular_arithmetic": _arithmetic,
    "reverse": _reverse, "sort": _sort, "stack": _stack,
}  # fmt: skip
