"""Perplexity of a text run by window: how well the next token is predicted with a context of that length.

A window of T tokens gives every token but its first a probability. Windows are placed so that every token of the
text but the very first is scored exactly once: with the default stride T - 1 they overlap in one token, which is scored
by the window it ends; with a smaller stride only a window's last `stride` tokens are scored, each with at least
T - stride tokens of context. Memory grows with the window by the trunk's activations, and with the text by a number per
token.

What a far context is worth shows by recurrence: before how many tokens the same few tokens stood last. A model that
looks that far may know what followed them. To compare two readings of a text token by token, both sort their losses
by one frame: by place in windows of that many tokens, and by the recurrences that such a window holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from traformer.devices import flush_denormals
from traformer.errors import InputError
from traformer.evaluation.batches import batch_sizes
from traformer.evaluation.opened import EvaluationOptions, OpenedRun
from traformer.evaluation.watcher import Watcher
from traformer.models.loss import token_losses
from traformer.runs.measurements import Job, Measurement, Request, measure_missing, reading_name
from traformer.tasks.base import Split
from traformer.tasks.lengths import length_label
from traformer.tasks.text import TOKENIZER_FOLDER, Text
from traformer.types import JsonObject

if TYPE_CHECKING:
    from traformer.data import TokenizedText

EXAMPLE_TOKENS = 8192  # of text that one of `--examples` stands for, the same text at every window
BLOCK = 1024  # tokens of text that are taken together for the interval, since neighbours are not independent
CONFIDENT = 1.959964  # standard errors of a 95 % interval
RECURRING = 4  # tokens before a token that must have occurred before, in the same order, for it to count as recurring


@dataclass
class Measured:
    """Sums over a text at one window."""

    window: int
    tokens: int
    recurrence: NDArray[np.int64]  # [tokens], see `recurrence_distances`
    frame: int | None = None  # sort by windows of this length, whichever window is read
    position_loss: NDArray[np.float64] = field(init=False)  # [window or frame], by place in it
    position_count: NDArray[np.int64] = field(init=False)
    block_loss: NDArray[np.float64] = field(init=False)  # [blocks], by place in the text
    block_count: NDArray[np.int64] = field(init=False)
    recurrence_loss: NDArray[np.float64] = field(init=False)  # [64], by the bits of the distance; 0: never before
    recurrence_count: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        blocks = -(-self.tokens // BLOCK)
        places = self.frame or self.window
        self.position_loss, self.position_count = np.zeros(places), np.zeros(places, dtype=np.int64)
        self.block_loss, self.block_count = np.zeros(blocks), np.zeros(blocks, dtype=np.int64)
        self.recurrence_loss, self.recurrence_count = np.zeros(64), np.zeros(64, dtype=np.int64)

    def add(self, losses: NDArray[np.float64], in_window: NDArray[np.int64], in_text: NDArray[np.int64]) -> None:
        distances = self.recurrence[in_text]
        if self.frame is not None:
            in_window = (in_text - 1) % (self.frame - 1) + 1  # windows of the frame overlap in one token
            distances = np.where(distances + RECURRING <= in_window, distances, 0)
        places = len(self.position_loss)
        self.position_loss += np.bincount(in_window, losses, minlength=places)
        self.position_count += np.bincount(in_window, minlength=places)
        block = in_text // BLOCK
        self.block_loss += np.bincount(block, losses, minlength=len(self.block_loss))
        self.block_count += np.bincount(block, minlength=len(self.block_count))
        bits = np.frexp(distances)[1]  # of distances 1, 2-3, 4-7, ...: 1, 2, 3, ...
        self.recurrence_loss += np.bincount(bits, losses, minlength=64)
        self.recurrence_count += np.bincount(bits, minlength=64)

    @property
    def scored(self) -> int:
        return int(self.position_count.sum())

    @property
    def loss(self) -> float:
        """Mean over scored tokens, in nats."""
        return float(self.block_loss.sum() / self.block_count.sum())

    def interval(self) -> tuple[float, float]:
        """95 % interval of the mean loss, from how blocks of text differ; the mean itself where there is one block."""
        used = self.block_count > 0
        blocks, total = int(used.sum()), self.block_count.sum()
        if blocks < 2:
            return self.loss, self.loss
        rest = self.block_loss[used] - self.loss * self.block_count[used]
        error = math.sqrt(float((rest**2).sum()) * blocks / (blocks - 1)) / total
        return self.loss - CONFIDENT * error, self.loss + CONFIDENT * error

    def by_position(self) -> list[tuple[int, int, float, int]]:
        """(first place, last place, mean loss, tokens) over places of the window in ranges that double: 1, 2-3, ..."""
        found = []
        first, places = 1, len(self.position_loss)
        while first < places:
            last = min(2 * first, places) - 1
            part = slice(first, last + 1)
            if count := self.position_count[part].sum():
                found.append((first, last, float(self.position_loss[part].sum() / count), int(count)))
            first *= 2
        return found

    def by_recurrence(self) -> list[tuple[int, int, float, int]]:
        """(shortest, longest distance, mean loss, tokens) of recurring tokens, distances in ranges that double."""
        return [
            (1 << bits - 1, (1 << bits) - 1, float(self.recurrence_loss[bits] / count), int(count))
            for bits, count in enumerate(self.recurrence_count)
            if bits and count
        ]


def recurrence_distances(tokens: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """How many tokens ago the RECURRING tokens before each token last occurred in the text, [n]; 0: never.

    At distance d the token d places back is what followed them then.
    """
    distances = np.zeros(len(tokens), dtype=np.int64)
    if len(tokens) <= RECURRING:
        return distances
    _, groups = np.unique(tokens, return_inverse=True)
    ids = groups = groups.astype(np.int64)
    for _ in range(RECURRING - 1):  # runs of one token more at each turn, numbered anew so that numbers stay small
        runs = groups[:-1] * len(tokens) + ids[len(ids) - len(groups) + 1 :]
        _, groups = np.unique(runs, return_inverse=True)
    order = np.argsort(groups[:-1], kind="stable")  # equal runs side by side, in the order of the text
    again = np.diff(groups[order]) == 0
    distances[RECURRING + order[1:][again]] = np.diff(order)[again]
    return distances


@dataclass(frozen=True)
class Window:
    """Tokens start .. stop - 1 are read, scored from `first` on."""

    start: int
    stop: int
    first: int


def windows(tokens: int, window: int, stride: int) -> Iterable[Window]:
    """Windows in which every token but the first is scored once; only the last may be shorter."""
    scored_to = min(window, tokens)
    yield Window(0, scored_to, 1)
    while scored_to < tokens:
        stop = min(scored_to + stride, tokens)
        # The last one keeps its full context; where a stride is left, it starts as a full window would.
        start = max(0, scored_to + stride - window)
        yield Window(start, stop, scored_to)
        scored_to = stop


@flush_denormals()
@torch.inference_mode()
def measure_perplexity(
    model: Any,
    text: TokenizedText,
    window: int,
    stride: int | None = None,
    tokens: int | None = None,
    batch_size: int = 1,
    advance: Callable[[int], None] = lambda tokens: None,
    frame: int | None = None,
) -> Measured:
    """Score the first `tokens` tokens (default all) of a text at one window, sorted by it or by another, the frame."""
    tokens = len(text) if tokens is None else min(tokens, len(text))
    stride = check_stride(window, stride)
    device = next(model.parameters()).device
    weight = model.get_output_embeddings().weight
    measured = Measured(window, tokens, recurrence_distances(text.tokens[:tokens]), frame)
    batch: list[Window] = []

    def run() -> None:
        ids = torch.from_numpy(np.stack([text.tokens[one.start : one.stop] for one in batch]).astype(np.int64)).to(
            device
        )
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state  # [n, T, E]
        first = batch[0].first - batch[0].start  # the same in all of them
        targets = ids[:, first:]  # [n, S]
        losses = token_losses(hidden[:, first - 1 : -1].flatten(0, 1), weight, targets.flatten())
        in_window = np.tile(np.arange(first, ids.shape[1]), len(batch))
        in_text = np.concatenate([np.arange(one.first, one.stop) for one in batch])
        measured.add(losses.double().cpu().numpy(), in_window, in_text)
        advance(ids.numel())
        batch.clear()

    def shape(one: Window) -> tuple[int, int]:
        return one.stop - one.start, one.first - one.start

    for one in windows(tokens, window, stride):
        if batch and (len(batch) == batch_size or shape(batch[0]) != shape(one)):
            run()
        batch.append(one)
    run()
    return measured


def check_stride(window: int, stride: int | None) -> int:
    """The stride, by default the largest: every token is read once."""
    if stride is None:
        return window - 1
    if not 1 <= stride < window:
        raise InputError(f"stride {stride} must be between 1 and {window - 1}, one less than the window {window}")
    return stride


def check_frame(window: int, frame: int | None) -> None:
    if frame is not None and frame < window:
        raise InputError(f"frame {frame} must be at least {window}, the longest window that is read")


def evaluate_text(run: OpenedRun, options: EvaluationOptions, watcher: Watcher) -> list[Measurement]:
    """Perplexity of a text run at every window."""
    if options.seed is not None or options.count_overlap:
        raise InputError("seed and overlap do not apply to text, which is read in order; leave them out")
    own = cast(Text, run.task)  # the one task whose evaluator this is
    stride, frame, split, data = (options.evaluator_options.get(name) for name in ("stride", "frame", "split", "data"))
    task = other_data(own, run.folder.path, data)
    check_vocabulary(run.model, task, run.folder.path)
    split = split or default_split(task, data)
    text = task.open(split)
    # What is measured in another way has another name, so that it is never drawn as one line with the rest.
    name = reading_name(" ".join([*([Path(data).name] if data else []), split]), stride, frame)
    lengths = wanted_lengths(task, options.lengths, text)
    splits = [Split(name, str(high), task.at_length(low, high)) for low, high in lengths]
    tokens = min(len(text), options.examples * EXAMPLE_TOKENS)
    for low, high in lengths:
        task.at_length(low, high).check_window(text, split)
        check_stride(high, stride)
        check_frame(high, frame)
    sizes = batch_sizes(run.model.config, splits, options.examples, options.batch_tokens, run.device)

    def request(one: Split) -> Request:
        protocol = describe(task, text, split, one.size, check_stride(one.size, stride), tokens)
        protocol |= {} if frame is None else {"frame": frame}
        protocol |= {} if data is None else {"text_fingerprint": text.fingerprint}  # a file may change under its name
        return Request(name, one.size, run.step, options.examples, run.config.seed, protocol=protocol)

    def measure_window(job: Job[Split]) -> Sequence[Measurement]:
        one = job.subject
        advance = partial(watcher.advance, one)
        measured = measure_perplexity(run.model, text, one.size, stride, tokens, sizes[one], advance, frame)
        return list(window_measurements(run, job.request, measured, text))

    def tokens_read(one: Split) -> int:
        return sum(w.stop - w.start for w in windows(tokens, one.size, check_stride(one.size, stride)))

    found = measure_missing(
        [Job(request(one), run.folder.results, one) for one in splits],
        measure_window,
        again=options.again,
        on_missing=lambda missing: watcher.start(sum(map(tokens_read, missing))),
    )
    return [one for _, measured in found for one in measured]


def other_data(task: Text, run: Path, data: str | None) -> Text:
    """The run's task, or the same on another text with the run's own tokenizer."""
    if data is None:
        return task
    return Text(data=(data,), tokenizer=str(run / TOKENIZER_FOLDER), length=task.length, separator=task.separator)


def default_split(task: Text, data: str | None) -> str:
    """The validation split; all of another text that has none of its own."""
    return (
        "all"
        if data is not None and (task.corpus.holds_out or "validation" not in task.corpus.sources)
        else "validation"
    )


def wanted_lengths(task: Text, lengths: str | Iterable[int | str] | None, text: TokenizedText) -> list[tuple[int, int]]:
    """Those asked for; else the task's own, as far as the text reaches."""
    if lengths is None:
        return [pair for pair in task.default_test_lengths() if pair[1] <= len(text)] or [(task.length, task.length)]
    from traformer.tasks import parse_lengths

    return parse_lengths(lengths)


def check_vocabulary(model: Any, task: Text, run: Path) -> None:
    spare = model.config.vocab_size - task.vocab_size  # a converted model may have more entries than its tokenizer
    if spare < 0 or (spare and model.config.model_type == "traformer"):
        raise InputError(
            f"the tokenizer {task.text_tokenizer.label!r} has {task.vocab_size:,} entries, but the checkpoint in {run} "
            f"was trained with {model.config.vocab_size:,}; evaluate with the tokenizer it was trained with"
        )


def describe(task: Text, text: TokenizedText, split: str, window: int, stride: int, tokens: int) -> JsonObject:
    """All that a perplexity depends on beside the model."""
    counts = text.counts
    return {
        "data": task.corpus.name,
        "split": task.corpus.describe(split),
        "tokenizer": task.text_tokenizer.label,
        "vocabulary": task.vocab_size,
        "window": window,
        "stride": stride,
        "tokens_read_of_text": tokens,
        "tokens_in_text": counts.tokens,
        "words_in_text": counts.words,
        "line_ends_in_text": counts.line_ends,
        "bytes_in_text": counts.bytes,
        "bos": f"id {task.text_tokenizer.end_id} before every document" if task.separator else "none",
        "documents": f"{len(text.documents)}, windows run across their ends",
        "word_normaliser": "words set apart by white space, and line ends",
    }


def position_text(measurements: Iterable[Measurement]) -> str:
    """Loss by place in the longest window, in one line."""
    by_place = [one for one in measurements if one.metric == "loss_by_place"]
    longest = max(one.size for one in by_place)
    parts = [
        f"{length_label(int(one.at['place']), int(one.at['to']))}: {one.value:.3f}"
        for one in by_place
        if one.size == longest
    ]
    return f"loss in nats by place in the window of {longest:,}: " + ", ".join(parts)


def window_measurements(
    run: OpenedRun, request: Request, measured: Measured, text: TokenizedText
) -> Iterator[Measurement]:
    """Perplexity per token and per word and bits per byte, with 95 % intervals; the loss by place and by recurrence."""
    counts = text.counts
    per_word = counts.tokens / (counts.words + counts.line_ends)
    per_byte = counts.tokens / counts.bytes / math.log(2)
    scales: dict[str, Callable[[float], float]] = {
        "perplexity": safe_exp,
        "word_perplexity": lambda loss: safe_exp(loss * per_word),
        "bits_per_byte": lambda loss: loss * per_byte,
    }
    low, high = measured.interval()
    for metric, scale in scales.items():
        yield run.measurement(request, metric, scale(measured.loss), scale(low), scale(high), counted=measured.scored)
    for first, last, loss, count in measured.by_position():
        yield run.measurement(request, "loss_by_place", loss, at={"place": first, "to": last}, counted=count)
    for first, last, loss, count in measured.by_recurrence():
        yield run.measurement(request, "loss_by_recurrence", loss, at={"distance": first, "to": last}, counted=count)


def safe_exp(value: float) -> float:
    """e to the value, capped where it would leave the floating-point numbers."""
    return math.exp(min(value, 700.0))
