"""How far a trained model stretches: sequences far beyond training, read chunk by chunk through the model's cache.

A chunk of tokens at a time keeps activations at a constant size; what grows is the cache alone, and the head runs only
where an answer is scored. TRA's early exit also keeps the time per token constant.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from traformer.devices import flush_denormals
from traformer.errors import InputError
from traformer.evaluation.opened import OpenedRun
from traformer.evaluation.watcher import Watcher
from traformer.methods import OPERATOR, RECURRENCE
from traformer.models import memory
from traformer.models.checks import cache_bytes
from traformer.models.observe import Attended, observe
from traformer.runs.measurements import Job, Measurement, Request, as_length, measure_missing
from traformer.tasks.base import Split, Task
from traformer.tasks.metrics import Scores, Tally

STUDY = "stretch"
CHUNK = 4096
# Peers write a mask, some of them scores, of chunk x context: their chunks shrink so that it never has more entries.
MASK_ENTRIES = 1 << 25
TOKEN_BYTES = 64  # of an example and of what drawing it takes, per token


@dataclass
class StretchRun(OpenedRun):
    """A run that takes part."""

    name: str = ""
    time_limit: float | None = None  # seconds per split and length; None: as long as it takes
    exhausted: int | None = None  # the length at which it ran out of time; longer ones are not tried
    warm: bool = False

    @property
    def writes_no_mask(self) -> bool:
        return all(method.path in (OPERATOR, RECURRENCE) for method in self.methods)

    def chunk(self, wanted: int, length: int) -> int:
        """Tokens at a time: as many as asked for, fewer where a mask of chunk x context would grow large."""
        return wanted if self.writes_no_mask else min(wanted, max(16, MASK_ENTRIES // length))


@dataclass
class Reading:
    """What came of one run at one split and length."""

    tally: Tally = field(default_factory=Tally)
    seconds: float = 0.0
    cpu_seconds: float = 0.0  # of all threads: the cost even where other processes shared the cores
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
    chunk: int = CHUNK,
    time_limit: float | None = None,
    splits: Iterable[str] | None = None,
    seed: int | None = None,
    device: str = "auto",
    again: bool = False,
    watcher: Watcher | None = None,
) -> dict[str, list[Measurement]]:
    """Measure runs of one task at long lengths: {run: measurements}, each split and length stored in its run at once.

    The first run has all the time it needs; each further one gets `time_limit` seconds per split and length, stops when
    they are over, and is not tried at longer lengths. What a run's store holds already is not measured again unless
    `again` is set. `splits` names the wanted ones, by default all.
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
    jobs = [
        Job(
            Request(split.name, as_length(split.length), run.step, examples, seed, STUDY, {"chunk": chunk}),
            run.folder.results,
            (run, split),
        )
        for split in wanted
        for run in runs
    ]
    found: dict[str, list[Measurement]] = {run.name: [] for run in runs}
    for (run, split), measured in measure_missing(
        jobs,
        lambda job: _measure(*job.subject, job.request, watcher),
        again=again,
        on_missing=lambda missing: watcher.start(sum(examples * split.task.sequence_length for _, split in missing)),
        usable=lambda subject, stored: _had_time_enough(subject[0], stored),
    ):
        found[run.name] += measured
        if any(one.value is None for one in measured) and run.exhausted is None:
            run.exhausted = split.size
    return found


def _had_time_enough(run: StretchRun, stored: Sequence[Measurement]) -> bool:
    """What ran out of time before counts if it had at least as much as it would have now."""
    if all(one.value is not None for one in stored):
        return True
    return run.time_limit is not None and run.time_limit <= (stored[0].protocol.get("time_limit") or 0)


# Before anything is run -----------------------------------------------------------------------------------------


def _open(path: str | Path, device: str, time_limit: float | None, watcher: Watcher) -> StretchRun:
    run = OpenedRun.open(path, device, watcher=watcher)
    return StretchRun(run.folder, run.model, run.task, run.config, run.step, str(path), time_limit)


def _check_runs(runs: Sequence[StretchRun]) -> None:
    if not runs:
        raise InputError("give at least one run folder")
    tasks = list(dict.fromkeys(run.config.task for run in runs))
    if len(tasks) > 1:
        raise InputError(f"the runs are of the tasks {' and '.join(tasks)}; stretch compares runs of one task")
    if runs[0].task.evaluator != "answers":
        raise InputError(f"stretch is for tasks with answers; for {tasks[0]}, use `tra eval`")
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
        on_cpu = parameter.device.type == "cpu"
        working = memory.memory_need(config, min(step, length), training=False, scored=min(step, length), on_cpu=on_cpu)
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


# Measuring ------------------------------------------------------------------------------------------------------


def _measure(run: StretchRun, split: Split, request: Request, watcher: Watcher) -> list[Measurement]:
    """All metrics of one run at one split and length; a value of None, with a note, where time was over."""
    length, examples = split.task.sequence_length, request.examples
    records = {**request.protocol, "threads": torch.get_num_threads(), "time_limit": run.time_limit}
    request = dataclasses.replace(request, protocol=records)
    headline = run.task.metrics[0]
    if run.exhausted is not None and split.size > run.exhausted:
        watcher.advance(split, examples * length)
        note = f"not tried: out of time at {run.exhausted:,} already"
        return [run.measurement(request, headline, None, note=note)]
    chunk = int(request.protocol["chunk"])
    reading = measure(
        run, split, examples, Task.test_seed(request.seed), chunk, run.chunk(chunk, length),
        lambda tokens: watcher.advance(split, tokens),
    )  # fmt: skip
    request = dataclasses.replace(request, protocol={**records, "seconds": round(reading.seconds, 3)})
    made = []
    if reading.stopped:
        watcher.advance(split, examples * length - reading.tokens)
        note = f"out of time: stopped after {run.time_limit:g} s at {reading.tokens:,} of {examples * length:,} tokens"
        made.append(run.measurement(request, headline, None, note=note))
    else:
        made += run.answer_measurements(request, split, reading.tally)
        for metric, value in (
            ("keys_read", reading.read_mean),
            ("keys_read_most", reading.read_most),
            ("keys_kept", reading.kept_mean),
        ):
            if value is not None:
                made.append(run.measurement(request, metric, float(value)))
    for metric, seconds in (
        ("microseconds_per_token", reading.seconds),
        ("cpu_microseconds_per_token", reading.cpu_seconds),
    ):
        made.append(run.measurement(request, metric, 1e6 * seconds / max(1, reading.tokens), counted=reading.tokens))
    return made


@flush_denormals()
@torch.inference_mode()
def measure(
    run: StretchRun, split: Split, examples: int, seed: int, chunk: int, step: int, advance: Callable[[int], None]
) -> Reading:
    """Examples 0 .. examples - 1 of a stream, `step` tokens of each at a time; short ones several at once."""
    device = next(run.model.parameters()).device
    length = split.task.sequence_length
    batch_size = max(1, min(examples, chunk // length))
    result = Reading()
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
    result: Reading,
    advance: Callable[[int], None],
    with_stats: bool,
) -> Scores | None:
    """One batch [n, T] through the cache; None when time is over."""
    trunk: Any = run.model.base_model
    head = run.model.get_output_embeddings()
    rows, length = input_ids.shape
    cache = trunk.new_cache()
    correct = torch.zeros(rows, dtype=torch.long, device=input_ids.device)
    for begin in range(0, length, step):
        if run.time_limit is not None and result.seconds > run.time_limit:
            return None
        end = min(begin + step, length)
        counter = KeyCounter()
        is_last = with_stats and end == length
        counts = is_last and any(method.path == OPERATOR for method in run.methods)
        with observe(run.model, visit=counter.count) if counts else nullcontext():
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
        if is_last:
            _note_keys(run, result, counter, begin, end)
    return Scores(correct, answers.sum(dim=1))


@dataclass
class KeyCounter:
    """Keys read and kept by the queries of one chunk, over all layers and heads; counting is off the clock."""

    seconds: float = 0.0  # what counting took
    cpu_seconds: float = 0.0
    queries: int = 0
    read: int = 0
    kept: int = 0
    most: int = 0

    def count(self, seen: Attended) -> None:
        clock, cpu_clock = time.perf_counter(), time.process_time()
        stats = seen.reads()
        if stats is not None:
            self.queries += stats.read.numel()
            self.read += int(stats.read.sum())
            self.kept += int(stats.kept.sum())
            self.most = max(self.most, int(stats.read.max()))
        self.seconds += time.perf_counter() - clock
        self.cpu_seconds += time.process_time() - cpu_clock


def _note_keys(run: StretchRun, result: Reading, counter: KeyCounter, begin: int, end: int) -> None:
    """Keys read by the queries of the last chunk, where the context is longest."""
    if counter.queries:
        result.kept_mean = counter.kept / counter.queries
    others = [method for method in run.methods if method.path != OPERATOR]
    if not all(method.reads_all_keys for method in others):
        return  # what these read is not counted
    share = len(others) / len(run.methods)  # of the layers that read every key
    counted = counter.read / counter.queries if counter.queries else 0.0
    result.read_mean = (1.0 - share) * counted + share * (begin + 1 + end) / 2
    result.read_most = end if others else counter.most
