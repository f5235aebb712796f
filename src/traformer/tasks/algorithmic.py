"""algorithmic: the small problems of the length-generalisation literature, as strings with an answer."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from traformer.errors import InputError, unknown_name
from traformer.tasks import rng
from traformer.tasks.base import Arrays, StringTask
from traformer.tasks.copy import draw_unique
from traformer.tasks.lengths import draw_lengths
from traformer.tasks.tokens import BOS, EOS, FIRST_SYMBOL, NO_SOURCE, PAD, SEP, SPECIAL_TOKENS, symbol_names

MODULUS = 5  # of modular arithmetic, and the places of the cycle
LETTERS = 10  # of reverse, sort and two_back
RECALL_LETTERS = 16  # of recall, whose keys and values are two letters each
RECALL_KEYS = RECALL_LETTERS**2
RECALL_QUERIES = 4  # at most
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
    "two_back": symbol_names(LETTERS),
    "recall": (*symbol_names(RECALL_LETTERS), "|", "?"),
}
PROBLEMS = tuple(SYMBOLS)
STAY, RIGHT, LEFT = range(MODULUS, MODULUS + 3)
PLUS, MINUS, TIMES = range(MODULUS, MODULUS + 3)
POP, PUSH_ZERO, PUSH_ONE = range(2, 5)
BAR, ASK = range(RECALL_LETTERS, RECALL_LETTERS + 2)

_LENGTH_DRAW, _STRING_DRAW, _KEY_DRAW, _ORDER_DRAW = range(4)
Strings = NDArray[np.int64]  # [n, longest]
Lengths = NDArray[np.int64]  # [n]


class Solved(NamedTuple):
    """Problems and their answers."""

    x: Strings
    length: Lengths  # of x
    y: Strings
    answer: Lengths  # the length of y
    places: Strings | None = None  # which symbol of x each one of y repeats, or NO_SOURCE; None: all NO_SOURCE


@dataclasses.dataclass(frozen=True)
class Algorithmic(StringTask):
    """`<bos> x <sep> y <eos>`: y is the answer to x and is scored with `<eos>`; the length is that of x.

    problem   parity (of the ones) | majority (the commoner bit, 0 if neither is) | cycle_navigation (the place on a
              cycle of 5 after steps from place 0) | modular_arithmetic (the value modulo 5 of a term of + - * with the
              usual precedence; an even length is one shorter) | reverse | sort | stack (the first half of x are bits,
              the last on top, the other half pushes and pops; y is the stack that is left, from the top) |
              two_back (every symbol of x is answered by the one two places before it, the first two by `a`) | recall
              (pairs of a key and a value, two letters each, then up to 4 keys; y is their values. A length that
              does not fit is a few shorter, and at least 8)

    two_back, majority and recall are after ASEntmax (its NBack and MQMTAR), the others after Deletang et al.
    """

    problem: str = "parity"
    max_length: int = 50
    min_length: int = 1

    name: ClassVar[str] = "algorithmic"
    label: ClassVar[str] = "Algorithmic"
    guess: ClassVar[str] = "one of the possible answers at random"

    def __post_init__(self) -> None:
        if self.problem not in PROBLEMS:
            raise unknown_name("problem", str(self.problem), PROBLEMS)
        self.check_lengths()
        if self.problem == "recall" and int(_recall_pairs(np.array(self.max_length))) > RECALL_KEYS:
            longest = 5 * RECALL_KEYS + 3 * RECALL_QUERIES
            raise InputError(
                f"recall has {RECALL_KEYS} keys, enough for {longest:,} symbols; give a shorter max_length"
            )

    def _token_names(self) -> tuple[str, ...]:
        return SPECIAL_TOKENS + SYMBOLS[self.problem]

    @property
    def sequence_length(self) -> int:
        longest = max(self.max_length, 8) if self.problem == "recall" else self.max_length
        return longest + 3 + self._longest_answer(self.max_length)

    def _longest_answer(self, length: int) -> int:
        if self.problem == "recall":
            return 2 * RECALL_QUERIES
        return length if self.problem in ("reverse", "sort", "stack", "two_back") else 1

    def _stream(self) -> tuple[int, ...]:
        return (PROBLEMS.index(self.problem), self.min_length, self.max_length)

    def chance(self, metric: str = "exact_match") -> float | None:
        """Of one of the possible answers at random, where the answer is one symbol; 0 for longer strings of symbols."""
        if metric != "exact_match":
            return None
        one = {"parity": 1 / 2, "majority": 1 / 2, "cycle_navigation": 1 / MODULUS, "modular_arithmetic": 1 / MODULUS}
        lengths = range(self.min_length, self.max_length + 1)
        if self.problem in one:
            return one[self.problem]
        if self.problem == "recall":
            counts = np.minimum(_recall_pairs(np.array(lengths)), RECALL_QUERIES)
            return float(np.mean(float(RECALL_KEYS) ** -counts))
        options = 2.0 if self.problem == "stack" else float(LETTERS)
        if self.problem == "two_back":  # the first two are known
            return sum(options ** -max(n - 2, 0) for n in lengths) / len(lengths)
        return sum(options**-n for n in lengths) / len(lengths)

    def _generate(self, keys: rng.Words) -> Arrays:
        length = draw_lengths(keys, _LENGTH_DRAW, self.min_length, self.max_length)
        if self.problem == "recall":
            return _sequences(_recall(keys, length))
        words = rng.draw_row(keys, _STRING_DRAW, int(length.max()))  # [n, longest]
        return _sequences(_SOLVE[self.problem](words, length))


def _sequences(solved: Solved) -> Arrays:
    x, length, y, answer, places = solved
    n, m = length[:, None], answer[:, None]
    position = np.arange(int((length + answer).max()) + 3)  # [T]
    question = (position >= 1) & (position <= n)
    answered = (position >= n + 2) & (position < n + 2 + m)
    ids = np.full((len(length), len(position)), PAD, dtype=np.int64)
    from_x = np.take_along_axis(x, np.broadcast_to(np.clip(position - 1, 0, x.shape[1] - 1)[None], ids.shape), axis=1)
    in_y = np.clip(position - n - 2, 0, y.shape[1] - 1)
    from_y = np.take_along_axis(y, in_y, axis=1)
    np.copyto(ids, from_x + FIRST_SYMBOL, where=question)
    np.copyto(ids, from_y + FIRST_SYMBOL, where=answered)
    ids[:, 0] = BOS
    np.copyto(ids, SEP, where=position == n + 1)
    end = position == n + m + 2
    np.copyto(ids, EOS, where=end)
    sources = np.full_like(ids, NO_SOURCE)
    if places is not None:
        place = np.take_along_axis(places, in_y, axis=1)
        np.copyto(sources, place + 1, where=answered & (place != NO_SOURCE))
    return Arrays(ids, answered | end, sources, length + answer + 3)


# Each solver takes random words [n, longest] and the lengths of x, [n]. ---------------------------------------------


def _inside(words: rng.Words, length: Lengths) -> NDArray[np.bool_]:
    return np.arange(words.shape[1]) < length[:, None]


def _one(values: NDArray[np.int64]) -> tuple[Strings, Lengths]:
    return values[:, None].astype(np.int64), np.ones(len(values), dtype=np.int64)


def _parity(words: rng.Words, length: Lengths) -> Solved:
    x = rng.below(words, 2)
    return Solved(x, length, *_one((x * _inside(words, length)).sum(axis=1) % 2))


def _majority(words: rng.Words, length: Lengths) -> Solved:
    x = rng.below(words, 2)
    return Solved(x, length, *_one(2 * (x * _inside(words, length)).sum(axis=1) > length))


def _cycle(words: rng.Words, length: Lengths) -> Solved:
    steps = rng.below(words, 3)  # stay, right, left
    moved = np.where(steps == 2, -1, steps) * _inside(words, length)
    return Solved(steps + STAY, length, *_one(moved.sum(axis=1) % MODULUS))


def _arithmetic(words: rng.Words, length: Lengths) -> Solved:
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
    return Solved(x, length, *_one((total + product) % MODULUS))


def _reverse(words: rng.Words, length: Lengths) -> Solved:
    x = rng.below(words, LETTERS)
    place = np.clip(length[:, None] - 1 - np.arange(x.shape[1]), 0, None)
    return Solved(x, length, np.take_along_axis(x, place, axis=1), length, place)


def _sort(words: rng.Words, length: Lengths) -> Solved:
    x = rng.below(words, LETTERS)
    return Solved(x, length, np.sort(np.where(_inside(words, length), x, LETTERS), axis=1) % LETTERS, length)


def _stack(words: rng.Words, length: Lengths) -> Solved:
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
    return Solved(x, length, np.take_along_axis(stack, place, axis=1), height)


def _two_back(words: rng.Words, length: Lengths) -> Solved:
    x = rng.below(words, LETTERS)
    place = np.broadcast_to(np.arange(x.shape[1]) - 2, x.shape)
    y = np.where(place < 0, 0, np.take_along_axis(x, np.clip(place, 0, None), axis=1))
    return Solved(x, length, y, length, np.where(place < 0, NO_SOURCE, place))


def _recall_pairs(length: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many pairs a string has: as many as fit, a pair being 5 symbols and each of up to 4 queries 3."""
    few = np.maximum(length // 8, 1)
    return np.where(few < RECALL_QUERIES, few, (length - 3 * RECALL_QUERIES) // 5)


def _recall(keys: rng.Words, length: Lengths) -> Solved:
    """`k k v v |` for every pair, keys differing, then `? k k` for every query; y is `v v` for each."""
    pairs = _recall_pairs(length)[:, None]  # [n, 1]
    queries = np.minimum(pairs, RECALL_QUERIES)
    most = int(pairs.max())
    there = np.arange(most) < pairs  # [n, P]
    key = draw_unique(keys, _KEY_DRAW, RECALL_KEYS, most)
    value = rng.below(rng.draw_row(keys, _STRING_DRAW, most), RECALL_KEYS)
    drawn = rng.draw_row(keys, _ORDER_DRAW, most) >> np.uint64(1)
    asked = np.argsort(np.where(there, drawn, np.uint64(1 << 63)), axis=1, kind="stable")  # [n, P]; the first are asked

    def of(table: Strings, number: Strings) -> Strings:
        return np.take_along_axis(table, np.clip(number, 0, most - 1), axis=1)

    def letter(word: Strings, part: Strings) -> Strings:
        return np.where(part == 0, word // RECALL_LETTERS, word % RECALL_LETTERS)

    end = (5 * pairs + 3 * queries)[:, 0]
    position = np.broadcast_to(np.arange(int(end.max())), (len(length), int(end.max())))
    pair, part = position // 5, position % 5
    x = np.where(part < 2, letter(of(key, pair), part), letter(of(value, pair), part - 2))
    np.copyto(x, BAR, where=part == 4)
    behind = position - 5 * pairs  # the queries
    query, part = behind // 3, behind % 3
    question = np.where(part == 0, ASK, letter(of(key, of(asked, query)), part - 1))
    np.copyto(x, question, where=behind >= 0)

    place = np.broadcast_to(np.arange(2 * RECALL_QUERIES), (len(length), 2 * RECALL_QUERIES))
    source = of(asked, place // 2)
    return Solved(x, end, letter(of(value, source), place % 2), 2 * queries[:, 0], 5 * source + 2 + place % 2)


_SOLVE = {
    "parity": _parity, "majority": _majority, "cycle_navigation": _cycle, "modular_arithmetic": _arithmetic,
    "reverse": _reverse, "sort": _sort, "stack": _stack, "two_back": _two_back,
}  # fmt: skip
