"""flip_flop: a one-bit memory that is written, read and distracted (Liu et al. 2023)."""

from __future__ import annotations

import dataclasses
from numbers import Real
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from traformer.errors import InputError
from traformer.tasks import rng
from traformer.tasks.base import Arrays, SequenceTask, Split
from traformer.tasks.checks import store
from traformer.tasks.lengths import draw_lengths, length_label
from traformer.tasks.tokens import NO_SOURCE, PAD

WRITE, READ, IGNORE, ZERO, ONE = range(1, 6)

SPARSE_P_IGNORE = 0.98
DENSE_P_IGNORE = 0.1

_LENGTH_DRAW, _PAIR_DRAW = range(2)


@dataclasses.dataclass(frozen=True)
class FlipFlop(SequenceTask):
    """(instruction, bit) pairs; the bit after a read is the last written one and alone is scored.

    The first instruction is w, the last r, the others i with `p_ignore`, w and r with half of the rest each; bits after
    w and i are uniform. `length` counts tokens, two per pair; with `min_length`, even lengths from there to `length`.
    """

    length: int = 512
    p_ignore: float = 0.8
    min_length: int | None = None

    name: ClassVar[str] = "flip_flop"
    label: ClassVar[str] = "Flip-flop"
    metrics: ClassVar[tuple[str, ...]] = ("exact_match", "token_accuracy", "error_per_read")
    deciding_offsets: ClassVar[tuple[int, ...]] = (-1, 0)  # the written bit and the w before it
    guess: ClassVar[str] = "always the same bit"
    stream: ClassVar[int | None] = 1
    shortest: ClassVar[int] = 4  # a write and a read

    def __post_init__(self) -> None:
        self.check_lengths()
        low, high = self.length_range
        for name, value in (("length", high), ("min_length", low)):
            if value % 2:
                raise InputError(f"{name} {value} is odd; flip_flop is made of pairs of tokens, give an even {name}")
        if isinstance(self.p_ignore, bool) or not isinstance(self.p_ignore, Real) or not 0.0 <= self.p_ignore <= 1.0:
            raise InputError(f"p_ignore must be a probability from 0 to 1, not {self.p_ignore!r}")
        store(self, p_ignore=float(self.p_ignore))

    def _token_names(self) -> tuple[str, ...]:
        return ("<pad>", "w", "r", "i", "0", "1")

    def _stream(self) -> tuple[int, ...]:
        return (*self.length_range, round(self.p_ignore * 2**32))

    def at_length(self, shortest: int, longest: int) -> FlipFlop:
        return dataclasses.replace(self, length=longest, min_length=None if shortest == longest else shortest)

    def possible_length(self, length: int) -> int:
        return length + length % 2

    def default_test_lengths(self) -> list[tuple[int, int]]:
        """The trained length, twice and four times it."""
        return [(self.length * factor, self.length * factor) for factor in (1, 2, 4)]

    def _splits_at(self, low: int, high: int) -> list[Split]:
        iid = self.at_length(low, high)
        sparse = dataclasses.replace(iid, p_ignore=SPARSE_P_IGNORE)
        dense = dataclasses.replace(iid, p_ignore=DENSE_P_IGNORE)
        label = length_label(low, high)
        return [Split("iid", label, iid), Split("sparse", label, sparse), Split("dense", label, dense)]

    def chance(self, metric: str = "exact_match") -> float | None:
        """Of always saying the same bit: half of the reads, and the sequences all of whose reads have that bit.

        On sparse sequences with few reads between writes the latter is far from 0.
        """
        if metric != "exact_match":
            return 0.5
        low, high = (length // 2 for length in self.length_range)
        change = (1.0 - self.p_ignore) / 2  # probability of w, and of r
        # Probability that every read so far had the guessed bit, and that the bit held now is it, or is the other.
        guessed = other = 0.5
        shares = []
        for pairs in range(2, high + 1):
            if pairs >= low:
                shares.append(guessed)  # the last pair is a read
            written = change * (guessed + other) / 2
            guessed, other = guessed * (1 - change) + written, other * (1 - 2 * change) + written
        return sum(shares) / len(shares)

    def irrelevant(self, example: Arrays, count: int) -> tuple[int, NDArray[np.int64]] | None:
        """Ignored pairs before the last read."""
        if count % 2:
            return None
        tokens = np.full(count, IGNORE, dtype=np.int64)
        tokens[1::2] = ZERO + np.random.default_rng(0).integers(0, 2, count // 2)
        return int(example.lengths[0]) - 2, tokens

    def _generate(self, keys: rng.Words) -> Arrays:
        low, high = self.length_range
        # Pairs per example, [n]; P is the most in this batch.
        pairs = draw_lengths(keys, _LENGTH_DRAW, low // 2, high // 2)
        count, width = len(keys), int(pairs.max())
        # One number per pair: its lowest bit is the bit, the 63 others choose the instruction.
        words = rng.draw_row(keys, _PAIR_DRAW, width)  # [n, P]
        bits = (words & np.uint64(1)).astype(np.int8)
        words >>= np.uint64(1)
        each = round((1.0 - self.p_ignore) * 2**62)  # probability of w, and of r, in units of 2**-63
        instructions = (words >= np.uint64(each)).view(np.int8) + (words >= np.uint64(2 * each)).view(np.int8)
        instructions += np.int8(WRITE)
        instructions[:, 0] = WRITE
        instructions[np.arange(count), pairs - 1] = READ

        place = np.arange(width, dtype=np.int32)
        last_write = np.maximum.accumulate(np.where(instructions == WRITE, place, np.int32(0)), axis=1)
        reads = instructions == READ
        bits = np.where(reads, np.take_along_axis(bits, last_write, axis=1), bits)
        beyond = None if low == high else place >= pairs[:, None]
        if beyond is not None:
            reads &= ~beyond

        input_ids = np.empty((count, 2 * width), dtype=np.int64)
        input_ids[:, 0::2] = instructions
        np.add(bits, ZERO, out=input_ids[:, 1::2])
        answers = np.zeros((count, 2 * width), dtype=np.bool_)
        answers[:, 1::2] = reads
        sources = np.full((count, 2 * width), NO_SOURCE, dtype=np.int64)
        sources[:, 1::2] = np.where(reads, 2 * last_write + 1, np.int32(NO_SOURCE))
        if beyond is not None:
            input_ids[np.repeat(beyond, 2, axis=1)] = PAD
        return Arrays(input_ids, answers, sources, 2 * pairs)
