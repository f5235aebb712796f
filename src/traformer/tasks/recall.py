"""recall: multi-query associative recall, its key-value pairs scattered in real text."""

from __future__ import annotations

import dataclasses
import math
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from traformer.data import python_stdlib
from traformer.data.corpus import DEFAULT_NOTE, checked_places
from traformer.errors import InputError
from traformer.tasks import rng
from traformer.tasks.base import TEST_STREAM, Arrays, SequenceTask, Split
from traformer.tasks.checks import check_count, store
from traformer.tasks.copy import draw_unique
from traformer.tasks.induction import expected_commonest_share
from traformer.tasks.lengths import draw_lengths, length_label
from traformer.tasks.tokens import BOS, FIRST_SYMBOL, NO_SOURCE, PAD, SEP, SPECIAL_TOKENS
from traformer.types import JsonObject, Options

if TYPE_CHECKING:
    from traformer.data import TokenizedText
    from traformer.tasks.text import Text

FIRST_KEY = FIRST_SYMBOL
BYTES = 256

_LENGTH_DRAW, _PAIRS_DRAW, _KEY_DRAW, _VALUE_DRAW, _PLACE_DRAW, _ORDER_DRAW, _TEXT_DRAW = range(7)


@dataclasses.dataclass(frozen=True)
class Recall(SequenceTask):
    """`<bos> context <sep> k [v] k [v] ...`: the context holds k v pairs, each key once; its values alone are scored.

    data        text that fills the context between the pairs, as bytes with ids of their own: a file, a folder or a
                name (see traformer.data.corpus), or a list of these; by default the built-in python-stdlib. An empty
                list: pairs alone, which is Zoology's MQAR
    length      tokens of the longest example; lengths are uniform from `min_length` (default: `length`)
    pairs       the most pairs; their number is uniform from `min_pairs` (default: 2). Without text the length
                decides it: an example of P pairs has 4 P + 2 tokens
    keys, values  how many symbols there are of each; keys are drawn without repetition, values with

    The pairs are at places drawn uniformly, and are asked for in random order. With text, a test at a longer length
    is done in two ways: split `fixed` has as many pairs as training has at most, in more text; split `growing` has
    pairs in proportion to the length, as far as there are keys. Test seeds draw from the validation text.
    """

    data: tuple[str, ...] = (python_stdlib.NAME,)
    length: int = 128
    min_length: int | None = None
    pairs: int | None = None
    min_pairs: int | None = None
    keys: int = 32
    values: int = 32

    name: ClassVar[str] = "recall"
    label: ClassVar[str] = "Recall"
    deciding_offsets: ClassVar[tuple[int, ...]] = (-1, 0)  # the value and its key
    guess: ClassVar[str] = "a value of the context, whichever its key"
    stream: ClassVar[int | None] = 6
    shortest: ClassVar[int] = 6

    def __post_init__(self) -> None:
        store(self, data=checked_places(self.data))
        self.check_lengths()
        low, high = self.length_range
        store(
            self,
            keys=check_count("keys", self.keys, 1, "there must be a key to ask for"),
            values=check_count("values", self.values, 2, "a single value needs no recall"),
        )
        if not self.data:
            for name in ("pairs", "min_pairs"):
                if getattr(self, name) is not None:
                    raise InputError(
                        f"{name} is for recall in text; with data=[] the length decides how many there are"
                    )
        else:
            pairs = check_count("pairs", 4 if self.pairs is None else self.pairs, 1, "recall needs a pair")
            fewest = min(2, pairs) if self.min_pairs is None else self.min_pairs
            fewest = check_count("min_pairs", fewest, 1, "there must be a pair to recall")
            store(self, pairs=pairs, min_pairs=fewest)
        fewest, most = self.pairs_range
        if fewest > most:
            raise InputError(f"min_pairs {fewest} is greater than pairs {most}; give a smaller min_pairs")
        if 4 * most + 2 > high or (self.data and 4 * fewest + 2 > low):
            needs = 4 * (most if 4 * most + 2 > high else fewest) + 2
            raise InputError(f"{most} pairs and their queries need {needs} tokens; give fewer pairs or a longer length")
        if most > self.keys:
            raise InputError(f"{most} pairs need as many keys, there are {self.keys}; give more keys or fewer pairs")

    @classmethod
    def notice(cls, options: Options) -> str | None:
        return None if "data" in options else DEFAULT_NOTE

    @classmethod
    def stored_options(cls, options: Options) -> JsonObject:
        return {**options, "data": list(checked_places(options.get("data", cls.data)))}

    @property
    def pairs_range(self) -> tuple[int, int]:
        """Fewest and most pairs of an example."""
        if self.data:
            assert self.pairs is not None and self.min_pairs is not None
            return self.min_pairs, self.pairs
        low, high = self.length_range
        return max(1, (low - 2) // 4), (high - 2) // 4

    def _token_names(self) -> tuple[str, ...]:
        keys = tuple(f"K{number}" for number in range(self.keys))
        values = tuple(f"V{number}" for number in range(self.values))
        letters = tuple(chr(b) if 33 <= b < 127 else f"\\x{b:02x}" for b in range(BYTES)) if self.data else ()
        return SPECIAL_TOKENS + keys + values + letters

    def _stream(self) -> tuple[int, ...]:
        return (*self.length_range, *self.pairs_range, self.keys, self.values, bool(self.data))

    def at_length(self, shortest: int, longest: int) -> Recall:
        return self._like(length=longest, min_length=None if shortest == longest else shortest)

    def possible_length(self, length: int) -> int:
        return max(length, 4 * self.pairs_range[1] + 2) if self.data else length

    def _like(self, **changes: int | None) -> Recall:
        other = dataclasses.replace(self, **changes)  # type: ignore[arg-type]
        other.__dict__["_text"] = self._text  # shared, so that nothing is opened twice
        return other

    def default_test_lengths(self) -> list[tuple[int, int]]:
        """The trained length and 2, 4, ... 512 times it: 128 to 65,536. Without text, as far as there are keys."""
        factors = [1 << power for power in range(10) if self.data or (self.length << power) <= 4 * self.keys + 2]
        return [(self.length * factor, self.length * factor) for factor in factors]

    def _splits_at(self, low: int, high: int) -> list[Split]:
        label = length_label(low, high)
        if not self.data:
            return [Split("test", label, self.at_length(low, high))]
        assert self.pairs is not None
        fixed = self._like(length=high, min_length=None if low == high else low, pairs=self.pairs, min_pairs=self.pairs)
        splits = [Split("fixed", label, fixed)]
        many = self.pairs * high // self.length
        if self.pairs < many <= self.keys and low == high:
            splits.append(Split("growing", label, self._like(length=high, min_length=None, pairs=many, min_pairs=many)))
        return splits

    def chance(self, metric: str = "exact_match") -> float:
        """Of a guess that knows the context's values but not their keys: the commonest one, or a random order."""
        fewest, most = self.pairs_range
        counts = range(fewest, most + 1)
        if metric != "exact_match":  # a query is as likely in an example of few pairs as in one of many
            asked = sum(counts)
            return sum(count * expected_commonest_share(count, self.values) for count in counts) / asked
        orders = [
            math.lgamma(count + self.values) - math.lgamma(count + 1) - math.lgamma(self.values)
            - count * math.log(self.values)
            for count in counts
        ]  # fmt: skip  # log of the mean of 1 / (orders that the values have)
        return sum(math.exp(order) for order in orders) / len(orders)

    # The text -------------------------------------------------------------------------------------------------

    @cached_property
    def _text(self) -> Text | None:
        from traformer.tasks.text import Text

        return Text(self.data, tokenizer="bytes", length=2) if self.data else None

    def _filler(self, split: str) -> TokenizedText | None:
        """The bytes of a split, long enough for the longest example."""
        if self._text is None:
            return None
        text = self._text.open(split)
        if len(text) < self.length:
            raise InputError(
                f"the {split} text of {', '.join(self.data)} has {len(text):,} bytes, too few for examples of "
                f"{self.length:,} tokens; give more text or a shorter length"
            )
        return text

    def prepare(self) -> None:
        """Read the training text, and check that it is long enough, before a run folder is made."""
        self._filler("train")

    def irrelevant(self, example: Arrays, count: int) -> tuple[int, NDArray[np.int64]] | None:
        """Text at the end of the context, where the context has text."""
        text = self._filler("validation")
        if text is None or len(text) < count:
            return None
        place = int((example.input_ids[0] == SEP).argmax())
        return place, text.tokens[:count].astype(np.int64) + FIRST_KEY + self.keys + self.values

    # Examples -------------------------------------------------------------------------------------------------

    def _draw(self, seed: int, start: int, count: int) -> Arrays:
        keys = rng.example_keys(self.stream_key(seed), start, count)
        return self._assemble(keys, self._filler("validation" if seed >= TEST_STREAM else "train"))

    def _assemble(self, keys: rng.Words, text: TokenizedText | None) -> Arrays:
        fewest, most = self.pairs_range
        pairs = draw_lengths(keys, _PAIRS_DRAW, fewest, most)[:, None]  # [n, 1]
        if text is None:
            length = 4 * pairs + 2
        else:
            low, high = self.length_range
            # As many pairs as drawn must fit, so the shortest lengths have few of them.
            low_each = np.maximum(low, 4 * pairs + 2)
            length = low_each + rng.below(rng.draw(keys, _LENGTH_DRAW)[:, None], high - low_each + 1)
        count, longest, width = len(keys), int(length.max()), int(pairs.max())
        rows = np.arange(count)[:, None]
        number = np.arange(width)  # [P]
        there = number < pairs  # [n, P]
        filler = length - 2 - 4 * pairs  # [n, 1] bytes of text

        key = draw_unique(keys, _KEY_DRAW, self.keys, width) + FIRST_KEY  # [n, P]
        value = rng.below(rng.draw_row(keys, _VALUE_DRAW, width), self.values) + FIRST_KEY + self.keys
        # A pair's place is the number of bytes before it; sorted, with every pair before it taking two more tokens.
        gaps = rng.below(rng.draw_row(keys, _PLACE_DRAW, width), filler + 1)
        gaps = np.sort(np.where(there, gaps, longest), axis=1)
        at = np.where(there, 1 + gaps + 2 * number, longest)  # [n, P]; pairs that are not there go to a spare column
        # The queries: the pairs of this example in random order.
        drawn = rng.draw_row(keys, _ORDER_DRAW, width) >> np.uint64(1)
        order = np.argsort(np.where(there, drawn, np.uint64(1 << 63)), axis=1, kind="stable")  # [n, P]
        asked = np.where(there, length - 2 * pairs + 2 * number, longest)

        ids = np.full((count, longest + 2), PAD, dtype=np.int64)  # two spare columns
        if text is not None:
            # A byte's place in its text: its position, less <bos>, less two for every pair before it.
            before = np.zeros(ids.shape, dtype=np.int64)
            np.add.at(before, (rows, at), 2)
            place = np.arange(-1, longest - 1) - np.cumsum(before[:, :longest], axis=1)
            first = rng.below(rng.draw(keys, _TEXT_DRAW)[:, None], len(text) - filler + 1)
            bytes_read = text.tokens[first + np.clip(place, 0, np.maximum(filler - 1, 0))]
            ids[:, :longest] = bytes_read.astype(np.int64) + FIRST_KEY + self.keys + self.values
        ids[:, 0] = BOS
        ids[rows, length - 2 * pairs - 1] = SEP
        ids[rows, at], ids[rows, at + 1] = key, value
        ids[rows, asked], ids[rows, asked + 1] = key[rows, order], value[rows, order]
        position = np.arange(longest)
        np.copyto(ids[:, :longest], PAD, where=position >= length)
        answers = np.zeros(ids.shape, dtype=np.bool_)
        answers[rows, asked + 1] = True
        sources = np.full(ids.shape, NO_SOURCE, dtype=np.int64)
        sources[rows, asked + 1] = at[rows, order] + 1
        return Arrays(
            np.ascontiguousarray(ids[:, :longest]), np.ascontiguousarray(answers[:, :longest]),
            np.ascontiguousarray(sources[:, :longest]), length[:, 0],
        )  # fmt: skip
