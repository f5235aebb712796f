"""instructions: one of several string operations, named at the start of the sequence."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from traformer.errors import InputError, unknown_name
from traformer.tasks import rng
from traformer.tasks.base import Arrays, Batch, StringTask
from traformer.tasks.checks import check_count, store
from traformer.tasks.lengths import draw_lengths
from traformer.tasks.tokens import BOS, EOS, NO_SOURCE, PAD, SEP, SPECIAL_TOKENS, symbol_names

# Name -> the shortest string that has an answer. The order fixes the token ids, whichever of them are used.
SHORTEST = {"copy": 0, "reverse": 0, "first": 1, "last": 1, "right_of": 2, "left_of": 2}
INSTRUCTIONS = tuple(SHORTEST)
COPY, REVERSE, FIRST, LAST, RIGHT_OF, LEFT_OF = range(6)

FIRST_INSTRUCTION = len(SPECIAL_TOKENS)
FIRST_SYMBOL = FIRST_INSTRUCTION + len(INSTRUCTIONS)

_LENGTH_DRAW, _INSTRUCTION_DRAW, _STRING_DRAW, _QUERY_DRAW, _PLACE_DRAW = range(5)


@dataclasses.dataclass(frozen=True)
class Instructions(StringTask):
    """`<bos> INS x <sep> [q] y <eos>`: y is what INS makes of x; y and `<eos>` are scored.

    The length of x is uniform, then INS is uniform over those that have an answer at that length: copy and reverse at
    any, first and last from 1, right_of and left_of (the neighbour of q, which occurs exactly once in x) from 2.
    Symbols are drawn uniformly with repetition. `instructions` is a sequence of names or one string "copy,reverse".
    """

    max_length: int = 50
    min_length: int = 0
    instructions: tuple[str, ...] = INSTRUCTIONS
    symbols: int = 64

    name: ClassVar[str] = "instructions"
    label: ClassVar[str] = "Instructions"
    guess: ClassVar[str] = "any symbols, the right number of them"
    stream: ClassVar[int | None] = 4
    shortest: ClassVar[int] = 0

    def __post_init__(self) -> None:
        self.check_lengths()
        if not isinstance(self.instructions, (str, list, tuple)):
            raise InputError(f"instructions must be names of {', '.join(INSTRUCTIONS)}, not {self.instructions!r}")
        given = tuple(self.instructions.split(",") if isinstance(self.instructions, str) else self.instructions)
        for instruction in given:
            if instruction not in INSTRUCTIONS:
                raise unknown_name("instruction", str(instruction), INSTRUCTIONS)
        if not given or len(set(given)) < len(given):
            raise InputError(f"instructions must be one or more different names of {', '.join(INSTRUCTIONS)}")
        least = min(SHORTEST[instruction] for instruction in given)
        if self.min_length < least:
            raise InputError(
                f"min_length {self.min_length} is too short; {' and '.join(given)} have an answer from length {least} "
                f"on, so give at least {least}"
            )
        symbols = check_count("symbols", self.symbols, 2, "a queried symbol needs another one beside it")
        ordered = tuple(instruction for instruction in INSTRUCTIONS if instruction in given)
        store(self, instructions=ordered, symbols=symbols)

    def _token_names(self) -> tuple[str, ...]:
        return SPECIAL_TOKENS + INSTRUCTIONS + symbol_names(self.symbols)

    @property
    def sequence_length(self) -> int:
        long_answers = "copy" in self.instructions or "reverse" in self.instructions
        asks = self.max_length >= 2 and ("right_of" in self.instructions or "left_of" in self.instructions)
        # <bos> INS x <sep> <eos>, and the longest of: a whole string, a query and its answer, one symbol.
        return self.max_length + 4 + max(self.max_length if long_answers else 1, 2 if asks else 0)

    def _stream(self) -> tuple[int, ...]:
        used = sum(1 << INSTRUCTIONS.index(instruction) for instruction in self.instructions)
        return (self.min_length, self.max_length, used, self.symbols)

    def _group(self) -> Callable[[Batch], list[str]]:
        return instruction_names

    def chance(self, metric: str = "exact_match") -> float | None:
        """A guess that knows how many symbols the answer has, but not which."""
        return self._guessed(metric, self.instructions)

    def group_chance(self, metric: str, group: str) -> float | None:
        """The same for the examples of one instruction."""
        return self._guessed(metric, (group,))

    def _guessed(self, metric: str, wanted: tuple[str, ...]) -> float | None:
        right = tokens = examples = 0.0
        for length in range(self.min_length, self.max_length + 1):
            able = [name for name in self.instructions if SHORTEST[name] <= length]
            for name in able:
                if name in wanted:
                    symbols = length if name in ("copy", "reverse") else 1
                    share = 1 / len(able)
                    examples, tokens = examples + share, tokens + share * (symbols + 1)
                    # <eos> is known from the length
                    exact = metric == "exact_match"
                    right += share * (float(self.symbols) ** -symbols if exact else symbols / self.symbols + 1)
        return right / (examples if metric == "exact_match" else tokens) if examples else None

    def _draw_instruction(self, keys: rng.Words, length: NDArray[np.int64]) -> NDArray[np.int64]:
        """Uniform over the instructions that have an answer at each length; [n]."""
        used = [INSTRUCTIONS.index(instruction) for instruction in self.instructions]
        # Row l of the table: the instructions that can be drawn at length l, for 0, 1 and (as the last) 2 or more.
        able = [[number for number in used if SHORTEST[INSTRUCTIONS[number]] <= size] for size in range(3)]
        table = np.array([row + [-1] * (len(used) - len(row)) for row in able])
        row = np.minimum(length, 2)
        counts = np.array([len(numbers) for numbers in able])
        drawn: NDArray[np.int64] = table[row, rng.below(rng.draw(keys, _INSTRUCTION_DRAW), counts[row])]
        return drawn

    def _generate(self, keys: rng.Words) -> Arrays:
        length = draw_lengths(keys, _LENGTH_DRAW, self.min_length, self.max_length)  # [n]
        instruction = self._draw_instruction(keys, length)
        count, longest = len(keys), int(length.max())
        rows = np.arange(count)

        # The queried symbol is at `place` and nowhere else: not last for right_of, not first for left_of.
        asks = instruction >= RIGHT_OF
        query = rng.below(rng.draw(keys, _QUERY_DRAW), self.symbols)
        place = rng.below(rng.draw(keys, _PLACE_DRAW), np.maximum(length - 1, 1)) + (instruction == LEFT_OF)
        strings = rng.below(rng.draw_row(keys, _STRING_DRAW, longest), (self.symbols - asks)[:, None])  # [n, longest]
        strings += asks[:, None] & (strings >= query[:, None])
        strings[rows[asks], place[asks]] = query[asks]

        whole = instruction <= REVERSE
        answer_length = np.where(whole, length, 1)
        answer_start = length + 3 + asks
        end = answer_start + answer_length  # position of <eos>

        # Column vectors against positions [T]. The string starts at position 2.
        position = np.arange(int(end.max()) + 1)
        step = position - answer_start[:, None]  # 0 on the first symbol of the answer
        answered = (step >= 0) & (step < answer_length[:, None])
        of_single = np.select(
            [instruction == FIRST, instruction == LAST, instruction == RIGHT_OF, instruction == LEFT_OF],
            [np.zeros_like(length), length - 1, place + 1, place - 1],
        )
        index = np.select(
            [(instruction == COPY)[:, None], (instruction == REVERSE)[:, None]],
            [step, length[:, None] - 1 - step],
            of_single[:, None],
        )
        index = np.where(answered, index, position - 2)  # place within x of each token's symbol
        if longest:
            input_ids = np.take_along_axis(strings, np.clip(index, 0, longest - 1), axis=1) + FIRST_SYMBOL
        else:
            input_ids = np.full((count, len(position)), PAD, dtype=np.int64)
        input_ids[:, 0] = BOS
        input_ids[:, 1] = instruction + FIRST_INSTRUCTION
        input_ids[rows, length + 2] = SEP
        input_ids[rows[asks], length[asks] + 3] = query[asks] + FIRST_SYMBOL
        input_ids[rows, end] = EOS
        np.copyto(input_ids, PAD, where=position > end[:, None])
        answers = answered | (position == end[:, None])
        return Arrays(input_ids, answers, np.where(answered, index + 2, NO_SOURCE), end + 1)


def instruction_names(batch: Batch) -> list[str]:
    """The instruction of every example."""
    return [INSTRUCTIONS[token - FIRST_INSTRUCTION] for token in batch.input_ids[:, 1].tolist()]
