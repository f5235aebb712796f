"""What every task shares: the batch it returns, the splits it is tested on, and the checks of its settings."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self, TypeAlias, Union

import numpy as np
from numpy.typing import NDArray

from traformer.errors import InputError, unknown_name
from traformer.tasks import rng
from traformer.tasks.checks import store, whole
from traformer.tasks.lengths import buckets, length_label, parse_lengths
from traformer.tasks.tokens import PAD
from traformer.types import JsonObject, Options

if TYPE_CHECKING:
    import torch

_CHANCE_EXAMPLES, _CHANCE_TOKENS = 4096, 1 << 20  # most that a guess is counted on
TokenIds: TypeAlias = Union[Iterable[int], NDArray[np.int64], "torch.Tensor"]
TEST_STREAM = 1 << 62  # set in every test seed and in no training seed


class Arrays(NamedTuple):
    """A batch before it becomes tensors; T is the longest example of the batch."""

    input_ids: NDArray[np.int64]  # [n, T], right-padded
    answers: NDArray[np.bool_]  # [n, T]
    sources: NDArray[np.int64]  # [n, T]
    lengths: NDArray[np.int64]  # [n]


@dataclasses.dataclass(frozen=True)
class Batch:
    """Examples as tensors. An answer at position t is predicted from the logits at t - 1."""

    input_ids: torch.Tensor  # int64 [n, T], right-padded with the task's pad id
    answers: torch.Tensor  # bool [n, T], True where the token is scored and trained on
    sources: torch.Tensor  # int64 [n, T], position of the key that decides an answer; -1 where there is none
    lengths: torch.Tensor  # int64 [n], tokens of each example without padding

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    @property
    def attention_mask(self) -> torch.Tensor:
        """bool [n, T], True on real tokens."""
        import torch

        return torch.arange(self.input_ids.shape[1], device=self.lengths.device) < self.lengths[:, None]

    def labels(self, ignore_index: int = -100) -> torch.Tensor:
        """The ids where they are answers and `ignore_index` elsewhere; not shifted, as Hugging Face models expect."""
        return self.input_ids.masked_fill(~self.answers, ignore_index)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The same batch on another device."""
        moved = {f.name: getattr(self, f.name).to(device, non_blocking=non_blocking) for f in dataclasses.fields(self)}
        return Batch(**moved)

    def by_length(self, parts: int) -> list[Batch]:
        """The same examples in `parts` batches of equally many, shorter ones first, each padded to its own longest."""
        import torch

        order = torch.argsort(self.lengths, stable=True)
        pieces = []
        for rows in order.tensor_split(parts):
            longest = int(self.lengths[rows].max())
            cut = {name: getattr(self, name)[rows, :longest] for name in ("input_ids", "answers", "sources")}
            pieces.append(Batch(**cut, lengths=self.lengths[rows]))
        return pieces


@dataclasses.dataclass(frozen=True)
class Split:
    """A set of examples to report on: the examples of `task`, under a split name and a length label."""

    name: str
    length: str  # "80" for exactly 80, "51-100" for uniform in 51 .. 100
    task: Task
    group: Callable[[Batch], list[str]] | None = None  # a label per example, for results within the split

    @property
    def size(self) -> int:
        """The largest length of the split, to order it and to place it on an axis."""
        return int(self.length.rpartition("-")[2])


class Task(ABC):
    """A generator of examples with random access: (seed, index) names one example, however it is asked for.

    Subclasses are frozen dataclasses whose fields are their settings; lengths are in the task's own unit (tokens for
    flip_flop, symbols elsewhere), `sequence_length` is in tokens.
    """

    name: ClassVar[str]
    label: ClassVar[str]  # the name as people read it
    metrics: ClassVar[tuple[str, ...]] = ("exact_match", "token_accuracy")  # names in traformer.runs.metrics
    evaluator: ClassVar[str] = "answers"  # how a model is measured on it: a name in traformer.evaluation.EVALUATORS
    # The keys that decide an answer, as offsets from its source: flip_flop's `w` before the written bit is one.
    deciding_offsets: ClassVar[tuple[int, ...]] = (0,)
    guess: ClassVar[str] = "the most frequent answer token, always"  # what `chance` is the accuracy of
    stream: ClassVar[int | None] = None  # set only where older runs fixed it; else it follows from the name
    length_unit: ClassVar[str] = "symbols"
    length_setting: ClassVar[str] = "max_length"  # the setting that `--length` sets
    shortest: ClassVar[int] = 1  # the smallest length the task makes sense at
    pad_id: ClassVar[int] = PAD

    # What a subclass defines ------------------------------------------------------------------------------------

    @abstractmethod
    def _token_names(self) -> tuple[str, ...]:
        """The text of every token id."""

    @property
    @abstractmethod
    def sequence_length(self) -> int:
        """Tokens of the longest example this setting can draw."""

    @property
    @abstractmethod
    def length_range(self) -> tuple[int, int]:
        """Shortest and longest length drawn, in the task's unit."""

    @abstractmethod
    def _stream(self) -> tuple[int, ...]:
        """The settings as integers, so that each setting has random numbers of its own."""

    def _generate(self, keys: rng.Words) -> Arrays:
        """The examples of these keys; each row may depend on its own key alone."""
        raise NotImplementedError(f"{type(self).__name__} defines neither _generate nor _draw")

    @abstractmethod
    def at_length(self, shortest: int, longest: int) -> Task:
        """The same task, same vocabulary, with lengths uniform in shortest .. longest."""

    def possible_length(self, length: int) -> int:
        """The shortest length from `length` on that the longest examples of the task can have."""
        return length

    @abstractmethod
    def default_test_lengths(self) -> list[tuple[int, int]]:
        """The (shortest, longest) pairs tested when none are given."""

    # What follows from it ---------------------------------------------------------------------------------------

    @cached_property
    def token_names(self) -> tuple[str, ...]:
        """The text of every token id."""
        return self._token_names()

    @property
    def vocab_size(self) -> int:
        """Number of token ids, padding included."""
        return len(self.token_names)

    def arrays(self, seed: int, start: int, count: int) -> Arrays:
        """Examples start .. start + count - 1 of a seed, as numpy arrays."""
        seed, start, count = whole("seed", seed), whole("start", start), whole("count", count)
        if not 0 <= seed < 2 * TEST_STREAM:
            raise InputError(f"seed {seed} is out of range; give a whole number from 0 to 2**63 - 1")
        if start < 0:
            raise InputError(f"start {start} is negative; the first example has index 0")
        if count < 1:
            raise InputError(f"count {count} is too small; ask for at least 1 example")
        return self._draw(seed, start, count)

    def _draw(self, seed: int, start: int, count: int) -> Arrays:
        """The examples of checked indices; a task whose examples are in files reads them from there instead."""
        return self._generate(rng.example_keys(self.stream_key(seed), start, count))

    def stream_key(self, seed: int) -> int:
        """The key of a seed's examples: it differs from those of other tasks and other settings."""
        return rng.stream_key(seed, rng.name_key(self.name) if self.stream is None else self.stream, *self._stream())

    def examples(self, seed: int, start: int, count: int) -> Batch:
        """Examples start .. start + count - 1 of a seed."""
        import torch

        return Batch(*(torch.from_numpy(array) for array in self.arrays(seed, start, count)))

    @staticmethod
    def test_seed(seed: int) -> int:
        """The seed of the test stream that belongs to a training seed; it is no training seed's own number."""
        seed = whole("seed", seed)
        if not 0 <= seed < TEST_STREAM:
            raise InputError(f"seed {seed} is out of range; a training seed is a whole number from 0 to 2**62 - 1")
        return seed + TEST_STREAM

    def chance(self, metric: str = "exact_match") -> float | None:
        """Accuracy (exact_match or token_accuracy) of a guess that does not solve the task; `guess` says which.

        By default the best constant answer, counted on drawn examples; a task overrides it where it has a formula.
        """
        count = max(1, min(_CHANCE_EXAMPLES, _CHANCE_TOKENS // self.sequence_length))
        return best_constant_answer(self.arrays(TEST_STREAM, 0, count), metric)

    def group_chance(self, metric: str, group: str) -> float | None:
        """The same for the examples of a group within a split; None: not known."""
        return None

    def irrelevant(self, example: Arrays, count: int) -> tuple[int, NDArray[np.int64]] | None:
        """A place in one example [1, T] for `count` tokens that bear on none of its answers, and those tokens.

        The place is between what decides the last answers and these answers. None: the task has no such place.
        """
        return None

    @property
    def end_id(self) -> int | None:
        """The token that ends a sequence, if the task has one."""
        return self.token_names.index("<eos>") if "<eos>" in self.token_names else None

    def deciding_keys(self, sources: torch.Tensor) -> torch.Tensor:
        """Positions [R, n] of the keys that decide the answers whose sources are given, [R]."""
        return sources[:, None] + sources.new_tensor(self.deciding_offsets)

    # Files on disk ---------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Make ready, and check, what training will read; called once, before the run folder is made."""

    def write_files(self, folder: Path) -> None:
        """Write what the run folder must keep so that its tokens can be read; called once, when it is made."""

    def use_files(self, folder: Path) -> None:
        """Read what `write_files` kept instead of making it again; called before a run's model is used."""

    def check_files(self, folder: Path) -> None:
        """Raise RunError if what `write_files` kept is not what this task would read now."""

    # Splits -----------------------------------------------------------------------------------------------------

    def test_splits(self, lengths: str | Iterable[int | str] | None = None) -> list[Split]:
        """What a model trained on this task is tested on; draw from them with `test_seed(seed)`.

        A length 80 is sequences of exactly 80, a range "51-100" is uniform in 51 .. 100; None is the task's own choice.
        """
        ranges = self.default_test_lengths() if lengths is None else parse_lengths(lengths)
        return [split for low, high in ranges for split in self._splits_at(low, high)]

    def _splits_at(self, low: int, high: int) -> list[Split]:
        return [Split("test", length_label(low, high), self.at_length(low, high), self._group())]

    def _group(self) -> Callable[[Batch], list[str]] | None:
        return None

    # Text -------------------------------------------------------------------------------------------------------

    @cached_property
    def _ids_by_name(self) -> dict[str, int]:
        return {name: token for token, name in enumerate(self.token_names)}

    def encode(self, text: str) -> list[int]:
        """Token ids of a line of tokens separated by spaces, as `decode` writes it."""
        known = self._ids_by_name
        for word in text.split():
            if word not in known:
                raise unknown_name(f"{self.name} token", word, _shortened(self.token_names))
        return [known[word] for word in text.split()]

    def _words(self, ids: TokenIds) -> list[str]:
        tokens = token_list(ids)
        while tokens and tokens[-1] == self.pad_id:
            tokens.pop()
        names = self.token_names
        for token in tokens:
            if not 0 <= token < len(names):
                raise InputError(f"ids holds {token}, but {self.name} has token ids 0 to {len(names) - 1} only")
        return [names[token] for token in tokens]

    def decode(self, ids: TokenIds) -> str:
        """One line of text for one example's ids (a sequence, array or tensor); padding at the end is left off."""
        return " ".join(self._words(ids))

    def format(self, batch: Batch, row: int, markup: bool = False) -> str:
        """One example as a line with its answers in [brackets], or in rich's console markup."""
        opening, closing = ("[bold green]", "[/]") if markup else ("[", "]")
        words = self._words(batch.input_ids[row])
        scored = batch.answers[row].tolist()
        return " ".join(f"{opening}{word}{closing}" if scored[t] else word for t, word in enumerate(words))

    # Settings ---------------------------------------------------------------------------------------------------

    @classmethod
    def setting_names(cls) -> list[str]:
        """The names of the constructor's settings."""
        return [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]

    def to_options(self) -> JsonObject:
        """The task's settings as plain values, as a run's config.yaml holds them."""
        settings = {name: getattr(self, name) for name in self.setting_names()}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}

    @classmethod
    def notice(cls, options: Options) -> str | None:
        """What a person should know before the task is used with these options; None: nothing."""
        return None

    @classmethod
    def stored_options(cls, options: Options) -> JsonObject:
        """The options as a run stores them: what depends on the folder or the machine is spelled out."""
        return dict(options)

    @classmethod
    def from_options(cls, options: Options) -> Task:
        """The inverse of `to_options`."""
        for name in options:
            if name not in cls.setting_names():
                raise unknown_name(f"{cls.name} setting", name, cls.setting_names())
        return cls(**options)


class StringTask(Task):
    """A task over strings whose length is uniform in min_length .. max_length; subclasses have both as settings."""

    min_length: int
    max_length: int
    test_ranges: ClassVar[int] = 10  # tested by default: the trained lengths, then ranges of the same reach beyond

    def check_lengths(self) -> None:
        """For use in __post_init__."""
        low, high = check_lengths(self, "min_length", self.min_length, "max_length", self.max_length)
        store(self, min_length=low, max_length=high)

    @property
    def length_range(self) -> tuple[int, int]:
        return self.min_length, self.max_length

    def at_length(self, shortest: int, longest: int) -> Self:
        return dataclasses.replace(self, min_length=shortest, max_length=longest)  # type: ignore[type-var]

    def default_test_lengths(self) -> list[tuple[int, int]]:
        """The trained lengths, then ranges of the same reach: 1-50, 51-100, 101-150, ..."""
        return buckets(self.min_length, max(self.max_length, 1), self.test_ranges)


class SequenceTask(Task):
    """A task whose sequences have `length` tokens, or lengths uniform from `min_length`; subclasses have both."""

    length: int
    min_length: int | None
    length_unit: ClassVar[str] = "tokens"
    length_setting: ClassVar[str] = "length"

    def check_lengths(self) -> None:
        """For use in __post_init__."""
        low, high = check_lengths(self, "min_length", self.length_range[0], "length", self.length)
        store(self, length=high, min_length=None if self.min_length is None else low)

    @property
    def sequence_length(self) -> int:
        return self.length

    @property
    def length_range(self) -> tuple[int, int]:
        return (self.length if self.min_length is None else self.min_length), self.length


def check_lengths(task: Task, low_name: str, low: object, high_name: str, high: object) -> tuple[int, int]:
    """Both ends as ints, or a sentence that names the one that is wrong."""
    most, least = whole(high_name, high), whole(low_name, low)
    for name, value in ((high_name, most), (low_name, least)):
        if value < task.shortest:
            need = f"{task.name} needs at least {task.shortest} {task.length_unit}"
            raise InputError(f"{name} {value} is too short; {need}")
    if least > most:
        raise InputError(f"{low_name} {least} is greater than {high_name} {most}; give a smaller {low_name}")
    return least, most


def token_list(ids: TokenIds) -> list[int]:
    """The ids of a sequence, array or tensor."""
    return [int(token) for token in (ids.tolist() if hasattr(ids, "tolist") else ids)]


def best_constant_answer(arrays: Arrays, metric: str) -> float:
    """Accuracy of the constant answer that is right most often: of whole examples, or of tokens."""
    rows, columns = np.nonzero(arrays.answers)
    tokens = arrays.input_ids[rows, columns]
    if metric == "token_accuracy":
        return float(np.bincount(tokens).max() / len(tokens))
    answered = arrays.answers.sum(axis=1)
    best = 0
    for token in np.unique(tokens).tolist():
        right = np.bincount(rows[tokens == token], minlength=len(answered))
        best = max(best, int((right == answered).sum()))
    return best / len(answered)


def _shortened(names: Sequence[str]) -> list[str]:
    return list(names) if len(names) <= 80 else [*names[:40], "..."]
