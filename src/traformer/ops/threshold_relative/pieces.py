"""Large problems as runs of queries, solved one after the other: Ctrl-C takes effect between two of them.

A call of compiled code ends only by itself. Pieces of a second or two keep a call of hours under its caller's control,
and the time of the first one shows how long the rest will take.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from traformer.ops.threshold_relative.problem import Problem

PIECE_WORK = 1 << 36  # products of channels: about a second of two AVX2 cores
FEWEST_QUERIES = 1024  # of a piece: each one prepares all its keys again, which is to stay a small part
LONG_SECONDS = 60.0  # a call that will take longer is announced


def _positions(problem: Problem) -> Tensor:
    return problem.query_start + torch.arange(problem.q.shape[2], device=problem.q.device)


def expected_reads(problem: Problem) -> Tensor:
    """Keys that each row will read, about; [B, Hq, Tq]. Rows that forget stop where what is left no longer weighs."""
    first = 0 if problem.first_key is None else problem.first_key
    visible = (_positions(problem) + 1.0 - first).expand(problem.log_decay.shape)
    if problem.tolerance == 0.0:
        return visible
    # Scores differ by a few units; half of the keys are kept; the weight of the n-th falls as e^(n g).
    falls = 2.0 * (10.0 - math.log(problem.tolerance)) / -problem.log_decay.float().clamp(max=-1e-30)
    return torch.minimum(visible, falls)


def cut(problem: Problem, reach: Tensor | None = None) -> list[tuple[int, int]]:
    """Runs [start, stop) of queries with about PIECE_WORK products each; one run where the problem is not large.

    reach: the leftmost key that each row reads, [B, Hq, Tq], where that is known.
    """
    batch, heads, queries, width = problem.q.shape
    most = batch * heads * queries * (problem.query_start + queries) * width
    if most <= 2 * PIECE_WORK or queries <= FEWEST_QUERIES:
        return [(0, queries)]
    reads = expected_reads(problem) if reach is None else (_positions(problem) + 1 - reach).clamp(min=0)
    work = reads.double().sum((0, 1)).cumsum(0) * width  # [Tq]
    runs, start = [], 0
    while start < queries:
        done = float(work[start - 1]) if start else 0.0
        stop = max(int(torch.searchsorted(work, done + PIECE_WORK)), start + FEWEST_QUERIES)
        stop = queries if stop + FEWEST_QUERIES > queries else stop
        runs.append((start, stop))
        start = stop
    return runs


def announced(problem: Problem, runs: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The runs. Where the first one shows that they will take long, that is said after it."""
    begun = time.monotonic()
    for done, run in enumerate(runs):
        yield run
        seconds = (time.monotonic() - begun) * len(runs)
        if done == 0 and len(runs) > 1 and seconds > LONG_SECONDS:
            logging.getLogger("traformer").warning(
                "attention of %d queries over %d keys will take about %s; Ctrl-C stops it",
                problem.q.shape[2], problem.k.shape[2], _rough(seconds),
            )  # fmt: skip


def _rough(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"
