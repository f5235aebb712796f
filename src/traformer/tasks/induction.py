"""induction: find a symbol in the context and give its right neighbour."""

from __future__ import annotations

import dataclasses
import math
from functools import lru_cache
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from traformer.tasks import rng
from traformer.tasks.base import Arrays, StringTask
from traformer.tasks.checks import check_count, store
from traformer.tasks.lengths import draw_lengths
from traformer.tasks.tokens import BOS, EOS, FIRST_SYMBOL, NO_SOURCE, PAD, SEP, SPECIAL_TOKENS, symbol_names

_NORMAL_FROM = 300  # draws per symbol

_LENGTH_DRAW, _CONTEXT_DRAW, _QUERY_DRAW, _PLACE_DRAW = range(4)


@dataclasses.dataclass(frozen=True)
class Induction(StringTask):
    """`<bos> ctx <sep> q a <eos>`: q occurs exactly once in ctx and not last, a is its right neighbour, alone scored.

    q is uniform over the symbols, its place uniform over all places but the last, every other place uniform over the
    symbols other than q. The lengths are those of ctx.
    """

    max_length: int = 50
    min_length: int = 2
    symbols: int = 64

    name: ClassVar[str] = "induction"
    label: ClassVar[str] = "Induction"
    guess: ClassVar[str] = "the most frequent symbol of the context"
    stream: ClassVar[int | None] = 3
    test_ranges: ClassVar[int] = 6
    shortest: ClassVar[int] = 2

    def __post_init__(self) -> None:
        self.check_lengths()
        symbols = check_count("symbols", self.symbols, 2, "induction needs another symbol beside the queried one")
        store(self, symbols=symbols)

    def _token_names(self) -> tuple[str, ...]:
        return SPECIAL_TOKENS + symbol_names(self.symbols)

    @property
    def sequence_length(self) -> int:
        return self.max_length + 5

    def _stream(self) -> tuple[int, ...]:
        return (self.min_length, self.max_length, self.symbols)

    def chance(self, metric: str = "exact_match") -> float:
        """Accuracy of the best guess that knows which symbols the context holds but not their order.

        That is the share of the commonest symbol among the places other than q's, on average over the lengths.
        """
        lengths = range(self.min_length, self.max_length + 1)
        return sum(expected_commonest_share(length - 1, self.symbols - 1) for length in lengths) / len(lengths)

    def irrelevant(self, example: Arrays, count: int) -> tuple[int, NDArray[np.int64]] | None:
        """Symbols other than the queried one at the end of the context."""
        size = int(example.lengths[0])
        query = int(example.input_ids[0, size - 3]) - FIRST_SYMBOL
        symbols = np.random.default_rng(0).integers(0, self.symbols - 1, count)
        return size - 4, symbols + (symbols >= query) + FIRST_SYMBOL

    def _generate(self, keys: rng.Words) -> Arrays:
        length = draw_lengths(keys, _LENGTH_DRAW, self.min_length, self.max_length)  # [n]
        count, longest = len(keys), int(length.max())
        rows = np.arange(count)
        query = rng.below(rng.draw(keys, _QUERY_DRAW), self.symbols)
        place = rng.below(rng.draw(keys, _PLACE_DRAW), length - 1)  # 0 .. length - 2
        context = rng.below(rng.draw_row(keys, _CONTEXT_DRAW, longest), self.symbols - 1)  # [n, longest]
        context += context >= query[:, None]  # over the query, so that it is never drawn
        context[rows, place] = query

        input_ids = np.full((count, longest + 5), PAD, dtype=np.int64)
        inside = np.arange(longest) < length[:, None]
        input_ids[:, 0] = BOS
        input_ids[:, 1 : longest + 1] = np.where(inside, context + FIRST_SYMBOL, PAD)
        input_ids[rows, length + 1] = SEP
        input_ids[rows, length + 2] = query + FIRST_SYMBOL
        input_ids[rows, length + 3] = context[rows, place + 1] + FIRST_SYMBOL
        input_ids[rows, length + 4] = EOS
        answers = np.zeros(input_ids.shape, dtype=np.bool_)
        answers[rows, length + 3] = True
        sources = np.full(input_ids.shape, NO_SOURCE, dtype=np.int64)
        sources[rows, length + 3] = place + 2
        return Arrays(input_ids, answers, sources, length + 5)


@lru_cache(maxsize=4096)
def expected_commonest_share(draws: int, symbols: int) -> float:
    """Mean of (count of the commonest symbol) / draws for uniform draws with repetition.

    E[max] = sum over m of P(max > m). Counts of uniform draws are independent Poisson counts given their sum, so
    P(max <= m) is the coefficient of x**draws in (sum over k <= m of pmf(k) x**k)**symbols over the pmf of the sum.
    Where symbols are counted in hundreds each, their counts are as good as normal and that serves instead.
    """
    if draws > _NORMAL_FROM * symbols:
        return 1 / symbols + _expected_normal_maximum(symbols) / math.sqrt(draws * symbols)
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, draws + 1)))])
    rate = draws / symbols
    pmf = np.exp(np.arange(draws + 1) * np.log(rate) - rate - log_factorial)
    of_sum = np.exp(draws * np.log(draws) - draws - log_factorial[draws])
    mean = 0.0
    for m in range(draws):
        if m * symbols < draws:  # too few places below m + 1 to hold all draws
            mean += 1.0
            continue
        degree = m * symbols
        power = np.fft.irfft(np.fft.rfft(pmf[: m + 1], degree + 1) ** symbols, degree + 1)
        exceeds = 1.0 - power[draws] / of_sum
        mean += exceeds
        if exceeds < 1e-7:  # above the rounding of the logarithms, far below what is printed
            break
    return float(mean / draws)


def _expected_normal_maximum(count: int) -> float:
    """Mean of the largest of `count` independent standard normal numbers."""
    grid = np.linspace(-9.0, 9.0, 18_001)
    below = np.array([0.5 * math.erfc(-z / math.sqrt(2)) for z in grid]) ** count  # P(max <= z)
    # The integral of z dP, by parts: the upper end, less the area under P.
    return float(grid[-1] - (below[1:] + below[:-1]).sum() / 2 * (grid[1] - grid[0]))
