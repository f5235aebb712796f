"""How far a trained model stretches: sequences far beyond training, read chunk by chunk through the model's cache.

A chunk of tokens at a time keeps activations at a constant size; what grows is the cache alone, and the head runs only
where an answer is scored. TRA's early exit keeps the time of a token constant, too.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from traformer.devices import flush_denormals
from traformer.errors import InputError, RunError
from traformer.evaluation.watcher import Watcher
from traformer.layers import ThresholdRelativeAttention
from traformer.methods import OPERATOR, RECURRENCE, Method, resolve_method
from traformer.models import memory
from traformer.models.checks import cache_bytes
from traformer.models.from_run import load_run
from traformer.runs.config import RunConfig
from traformer.storage import write_atomically
from traformer.tasks.base import Split, Task
from traformer.tasks.metrics import Scores, Tally

Row = dict[str, Any]
CHUNK = 4096
# Peers write a mask, some of them scores, of chunk x context: their chunks shrink so that it never has more entries.
MASK_ENTRIES = 1 << 25
TOKEN_BYTES = 64  # of an example and of what drawing it takes, a token


@dataclass
class StretchRun:
    """A run that takes part."""

    name: str
    model: Any
    task: Task
    config: RunConfig
    step: int
    time_limit: float | None
    exhausted: int | None = None  # the length at which it ran out of time; longer ones are not tried
    warm: bool = False

    @property
    def method(self) -> Method:
        return resolve_method(self.config.attention, self.config.attention_options)

    @property
    def writes_no_mask(self) -> bool:
        return self.method.path in (OPERATOR, RECURRENCE)

    def chunk(self, wanted: int, length: int) -> int:
        """Tokens at a time: as many as asked for, fewer where a mask of chunk x context would grow large."""
        return wanted if self.writes_no_mask else min(wanted, max(16, MASK_ENTRIES // length))


@dataclass
class Measurement:
    """What came of one run at one split and length."""

    tally: Tally = field(default_factory=Tally)
    seconds: float = 0.0
    cpu_seconds: float = 0.0  # of all threads: what it cost even where other processes had the cores, too
    tokens: int = 0
    stopped: bool = False
    read_mean: float | None = None
    read_most: int | None = None
    kept_mean: float | None = None


def stretch(
    paths: Sequence[str | Path],
    lengths: str | Iterable[int | str],
    examples: int = 10,
    *,
    out: str | Path | None = None,
    chunk: int = CHUNK,
    time_limit: float | None = None,
    splits: Iterable[str] | None = None,
    seed: int | None = None,
    device: str = "auto",
    again: bool = False,
    watcher: Watcher | None = None,
) -> list[Row]:
    """Measure runs of one task at long lengths: a row for each length, split and run, written to stretch.json at once.

    The first run has all the time it needs; each further one gets `time_limit` seconds a row, stops when they are over,
    and is not tried at longer lengths. What the file holds already is not measured again unless `again` is set. `out`
    is the folder of the file, `stretch` in the first run's by default; `splits` names the wanted ones, by default all.
    """
    if examples < 1 or chunk < 1:
        raise InputError(f"examples and chunk must be whole numbers above zero, not {examples} and {chunk}")
    watcher = watcher or Watcher()
    runs = [_open(path, device, None if place == 0 else time_limit, watcher) for place, path in enumerate(paths)]
    _check_runs(runs)
    wanted = [split for split in runs[0].task.test_splits(lengths) if splits is None or split.name in set(splits)]
    if not wanted:
        names = ", ".join(dict.fromkeys(split.name for split in runs[0].task.test_splits(lengths)))
        raise InputError(f"no split of that name; {runs[0].config.task} has: {names}")
    wanted.sort(key=lambda split: split.size)
    seed = runs[0].config.seed if seed is None else seed
    for run in runs:
        check_memory(run, wanted, chunk)
    file = Path(out or Path(paths[0]) / "stretch") / "stretch.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    stored = read_rows(file)
    rows: list[Row] = []
    missing: list[tuple[StretchRun, Split]] = []
    for split in wanted:
        for run in runs:
            found = None if again else _stored(stored, run, split, examples, seed, chunk)
            if found is None:
                missing.append((run, split))
            else:
                rows.append(found)
                _note_time(run, split, found)
    watcher.start(sum(examples * split.task.sequence_length for _, split in missing))
    for run, split in missing:
        row = _row(run, split, examples, seed, chunk, watcher)
        _note_time(run, split, row)
        rows.append(row)
        stored = [other for other in stored if _key(other) != _key(row)] + [row]
        write_rows(file, stored)
    order = {(split.name, split.length): place for place, split in enumerate(wanted)}
    place_of = {run.name: place for place, run in enumerate(runs)}
    return sorted(rows, key=lambda row: (order[row["split"], str(row["length"])], place_of[row["run"]]))


def read_rows(file: Path) -> list[Row]:
    """The rows of an earlier call, or none."""
    if not file.exists():
        return []
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(rows, list) or not all(isinstance(row, dict) and "run" in row for row in rows):
            raise ValueError
    except (OSError, ValueError):
        raise RunError(f"{file} is not a list of stretch's rows; move it away, or choose another --out") from None
    return rows


def write_rows(file: Path, rows: list[Row]) -> None:
    ordered = sorted(rows, key=lambda row: (row["run"], row["split"], row["size"]))
    write_atomically(file, "[\n  " + ",\n  ".join(json.dumps(row) for row in ordered) + "\n]\n")


# Before anything is run -----------------------------------------------------------------------------------------


def _open(path: str | Path, device: str, time_limit: float | None, watcher: Watcher) -> StretchRun:
    model, task, config, step = load_run(path, device=device, warn=watcher.say)
    return StretchRun(str(path), model, task, config, step, time_limit)


def _check_runs(runs: Sequence[StretchRun]) -> None:
    if not runs:
        raise InputError("give at least one run folder")
    tasks = list(dict.fromkeys(run.config.task for run in runs))
    if len(tasks) > 1:
        raise InputError(f"the runs are of the tasks {' and '.join(tasks)}; stretch compares runs of one task")
    if tasks[0] == "text":
        raise InputError("stretch is for tasks with answers; for text, `tra eval` measures perplexity by window")
    if len({run.name for run in runs}) < len(runs):
        raise InputError("a run is named twice")


def check_memory(run: StretchRun, splits: Sequence[Split], chunk: int) -> None:
    """Raise InputError for the shortest length whose cache, chunk and tokens memory cannot hold."""
    config = run.model.config
    parameter = next(run.model.parameters())
    available = memory.available_memory(parameter.device)
    for split in splits:
        length = split.task.sequence_length
        rows, step = max(1, chunk // length), run.chunk(chunk, length)
        working = memory.memory_need(config, min(step, length), training=False, scored=min(step, length))
        need = (
            cache_bytes(config, rows, length, parameter.dtype)
            + working.total(rows)
            + TOKEN_BYTES * rows * length
            + (0 if run.writes_no_mask else 8 * step * length)
        )
        memory.check_fits(
            need, available, f"a context of {length:,} tokens ({split.name}) with {run.name}",
            "leave that length out of --lengths",
        )  # fmt: skip


# Rows -----------------------------------------------------------------------------------------------------------


def _key(row: Row) -> tuple[Any, ...]:
    return row["run"], row["split"], row["length"]


def _stored(rows: Sequence[Row], run: StretchRun, split: Split, examples: int, seed: int, chunk: int) -> Row | None:
    """The row of an earlier call with the same settings. One that ran out of time counts if it had at least as much."""
    for row in rows:
        if (row["run"], row["split"], row["length"]) != (run.name, split.name, _length(split)):
            continue
        if (row["step"], row["examples"], row["seed"], row["chunk"]) != (run.step, examples, seed, chunk):
            continue
        if row["status"] == "measured" or (run.time_limit is not None and run.time_limit <= (row["time_limit"] or 0)):
            return row
    return None


def _note_time(run: StretchRun, split: Split, row: Row) -> None:
    if row["status"] != "measured" and run.exhausted is None:
        run.exhausted = split.size


def _row(run: StretchRun, split: Split, examples: int, seed: int, chunk: int, watcher: Watcher) -> Row:
    """Measure one run at one split and length."""
    length = split.task.sequence_length
    row: Row = {
        "run": run.name, "task": run.config.task, "attention": run.config.attention, "split": split.name,
        "length": _length(split), "size": split.size, "train_length": run.task.length_range[1], "step": run.step,
        "examples": examples, "seed": seed, "chunk": chunk, "threads": torch.get_num_threads(),
        "time_limit": run.time_limit,
    }  # fmt: skip
    if run.exhausted is not None and split.size > run.exhausted:
        watcher.advance(split, examples * length)
        return {**row, "status": "not tried", "reason": f"out of time at {run.exhausted:,} already"}
    step = run.chunk(chunk, length)
    result = measure(
        run, split, examples, Task.test_seed(seed), chunk, step, lambda tokens: watcher.advance(split, tokens)
    )
    row["seconds"] = round(result.seconds, 3)
    row["microseconds_per_token"] = 1e6 * result.seconds / max(1, result.tokens)
    row["cpu_microseconds_per_token"] = 1e6 * result.cpu_seconds / max(1, result.tokens)
    if result.stopped:
        watcher.advance(split, examples * length - result.tokens)
        limit = f"{run.time_limit:g} s"
        reason = f"stopped after {limit} at {result.tokens:,} of {examples * length:,} tokens"
        return {**row, "status": "out of time", "reason": reason}
    tally = result.tally
    errors, exact = tally.error_per_answer(), tally.exact_match()
    row |= {
        "status": "measured", "answers": tally.tokens, "errors": tally.tokens - tally.correct,
        "error_per_answer": errors.value, "error_upper_bound": errors.high, "exact_match": exact.value,
        "exact_low": exact.low, "exact_high": exact.high, "keys_read_mean": result.read_mean,
        "keys_read_most": result.read_most, "keys_kept_mean": result.kept_mean,
    }  # fmt: skip
    chance = split.task.chance()
    return row if chance is None else {**row, "chance": chance}


def _length(split: Split) -> int | str:
    return int(split.length) if split.length.isdigit() else split.length


# Measuring ------------------------------------------------------------------------------------------------------


@flush_denormals()
@torch.inference_mode()
def measure(
    run: StretchRun, split: Split, examples: int, seed: int, chunk: int, step: int, advance: Callable[[int], None]
) -> Measurement:
    """Examples 0 .. examples - 1 of a stream, `step` tokens of each at a time; short ones several at once."""
    device = next(run.model.parameters()).device
    length = split.task.sequence_length
    batch_size = max(1, min(examples, chunk // length))
    result = Measurement()
    if not run.warm:  # the first forward loads libraries and wakes threads, which is no token's time
        run.model.base_model(input_ids=split.task.examples(seed, 0, 1).input_ids[:, :256].to(device), use_cache=False)
        run.warm = True
    for start in range(0, examples, batch_size):
        count = min(batch_size, examples - start)
        batch = split.task.examples(seed=seed, start=start, count=count).to(device)
        scores = _read(run, batch.input_ids, batch.answers, step, result, advance, with_stats=start == 0)
        if scores is None:
            result.stopped = True
            return result
        result.tally.add(scores)
    return result


def _read(
    run: StretchRun,
    input_ids: Tensor,
    answers: Tensor,
    step: int,
    result: Measurement,
    advance: Callable[[int], None],
    with_stats: bool,
) -> Scores | None:
    """One batch [n, T] through the cache; None when time is over."""
    trunk, head = run.model.base_model, run.model.get_output_embeddings()
    rows, length = input_ids.shape
    cache = trunk.new_cache()
    correct = torch.zeros(rows, dtype=torch.long, device=input_ids.device)
    for begin in range(0, length, step):
        if run.time_limit is not None and result.seconds > run.time_limit:
            return None
        end = min(begin + step, length)
        with key_counter(run, with_stats and end == length) as counter:
            clock, cpu_clock = time.perf_counter(), time.process_time()
            hidden = trunk(input_ids=input_ids[:, begin:end], past_key_values=cache, use_cache=True).last_hidden_state
            row, place = answers[:, begin + 1 : end + 1].nonzero(as_tuple=True)
            guess = head(hidden[row, place]).argmax(-1)  # the head runs on scored places alone
            right = guess == input_ids[row, begin + 1 + place]
            correct.index_add_(0, row, right.long())
            if correct.device.type == "cuda":
                torch.cuda.synchronize()
            result.seconds += time.perf_counter() - clock - counter.seconds
            result.cpu_seconds += time.process_time() - cpu_clock - counter.cpu_seconds
        if begin == 0 and end < length:
            cache.reserve(length)  # the length is known: no copies on the way, and no room to spare at the end
        result.tokens += rows * (end - begin)
        advance(rows * (end - begin))
        if with_stats and end == length:
            _note_keys(run, result, counter, begin, end)
    return Scores(correct, answers.sum(dim=1))


@dataclass
class KeyCounter:
    """Keys read and kept by the queries of one chunk, over all layers and heads."""

    seconds: float = 0.0  # what counting took
    cpu_seconds: float = 0.0
    queries: int = 0
    read: int = 0
    kept: int = 0
    most: int = 0


@contextmanager
def key_counter(run: StretchRun, active: bool) -> Iterator[KeyCounter]:
    """Count what the TRA layers read while inside: each call is made a second time for its counts, off the clock."""
    counter = KeyCounter()
    layers: list[Any] = []
    if active and run.method.path == OPERATOR:
        layers = [layer for layer in run.model.modules() if isinstance(layer, ThresholdRelativeAttention)]
    for layer in layers:
        layer.attend = _counted(layer, counter)
    try:
        yield counter
    finally:
        for layer in layers:
            del layer.attend


def _counted(layer: Any, counter: KeyCounter) -> Callable[..., Any]:
    attend = layer.attend

    def counted(q: Tensor, k: Tensor, v: Tensor, hidden_states: Tensor, context: Any) -> Any:
        clock, cpu_clock = time.perf_counter(), time.process_time()
        stats = layer.reads(q, k, hidden_states, context)
        counter.queries += stats.read.numel()
        counter.read += int(stats.read.sum())
        counter.kept += int(stats.kept.sum())
        counter.most = max(counter.most, int(stats.read.max()))
        counter.seconds += time.perf_counter() - clock
        counter.cpu_seconds += time.process_time() - cpu_clock
        return attend(q, k, v, hidden_states, context)

    return counted


def _note_keys(run: StretchRun, result: Measurement, counter: KeyCounter, begin: int, end: int) -> None:
    """Keys read by the queries of the last chunk, where the context is longest."""
    if counter.queries:
        result.read_mean, result.read_most = counter.read / counter.queries, counter.most
        result.kept_mean = counter.kept / counter.queries
    elif run.method.reads_all_keys:
        result.read_mean, result.read_most = (begin + 1 + end) / 2, end
