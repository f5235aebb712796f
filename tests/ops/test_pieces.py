"""Large problems on the compiled backend are solved in pieces: the same result, and Ctrl-C is heard in between."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from tests.ops.cases import make, run
from traformer.ops import threshold_relative_attention
from traformer.ops.threshold_relative import cpu, pieces

pytestmark = pytest.mark.skipif(not cpu.is_available(), reason=str(cpu.unavailable_reason()))


@pytest.fixture
def small_pieces(monkeypatch):
    """Every problem of a few hundred queries is large."""
    monkeypatch.setattr(pieces, "PIECE_WORK", 1 << 14)
    monkeypatch.setattr(pieces, "FEWEST_QUERIES", 20)


@pytest.fixture
def calls(monkeypatch):
    """How often the kernel is called, by function."""
    counted = []
    original = cpu._run
    monkeypatch.setattr(cpu, "_run", lambda function, call: (counted.append(function), original(function, call)))
    return counted


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tolerance": 0.0, "exclude_self": True},
        {"surrogate_width": 0.5, "threshold": torch.full((2, 4, 200), 0.1)},
        {"dropout_p": 0.3, "dropout_seed": 5},
        {"key_padding_mask": torch.arange(230).expand(2, 230) > 30},
    ],
)
@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 16), (torch.bfloat16, 12)])
def test_pieces_change_nothing(options, dtype, width, request):
    inputs = make(queries=200, keys=230, width=width, dtype=dtype)
    whole = run(inputs, "cpu", **options)
    request.getfixturevalue("small_pieces")
    calls = request.getfixturevalue("calls")
    found = run(inputs, "cpu", **options)
    assert calls.count("tra_forward") > 3 and calls.count("tra_backward") > 3
    # Rows in other blocks may read a few keys more or less; sums over rows are added in another order.
    close = {"rtol": 2e-5, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    for x, y in zip(found, whole, strict=True):
        torch.testing.assert_close(x, y, **close)


def test_packed_sequences_in_pieces(small_pieces, calls):
    inputs = make(batch=1, queries=200, width=16, dtype=torch.float32)
    packed = {"cu_seqlens": torch.tensor([0, 90, 91, 200])}
    found = run(inputs, "cpu", **packed)
    assert calls.count("tra_forward") > 2
    for x, y in zip(found, run(inputs, "reference", **packed), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


def test_an_interrupt_stops_the_call_after_a_piece(small_pieces, calls, monkeypatch):
    counted = cpu._run

    def interrupted(function, call):
        counted(function, call)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGINT)  # as Ctrl-C does

    monkeypatch.setattr(cpu, "_run", interrupted)
    inputs = [x.detach() for x in make(queries=400, width=16, dtype=torch.float32, decay="zero")]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            threshold_relative_attention(*inputs, backend="cpu")
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(calls) == 2


def test_a_call_that_takes_long_is_announced_with_its_time(small_pieces, monkeypatch, caplog):
    clock = iter(range(0, 10**6, 100))
    monkeypatch.setattr(pieces.time, "monotonic", lambda: next(clock))
    inputs = [x.detach() for x in make(queries=400, width=16, dtype=torch.float32, decay="zero")]
    threshold_relative_attention(*inputs, backend="cpu")
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("attention of 400 queries over 400 keys will take about ") and "Ctrl-C stops it" in said


def test_pieces_have_about_equal_work_and_cover_every_query():
    queries = 1 << 20
    shape = (1, 1, queries)
    q = torch.empty(1, 1, 1, 8).expand(1, 1, queries, 8)
    never_forget = _problem(q, torch.zeros(1, 1, 1).expand(shape))
    runs = pieces.cut(never_forget)
    assert [start for start, _ in runs] == [0, *(stop for _, stop in runs[:-1])] and runs[-1][1] == queries
    sizes = [(stop - start) * (start + stop) // 2 * 8 for start, stop in runs]
    assert max(sizes) <= 1.1 * pieces.PIECE_WORK and len(runs) > 50
    # Rows that forget read little however many keys there are: one call.
    assert pieces.cut(_problem(q, torch.full(shape, -0.7))) == [(0, queries)]
    # The backward knows what was read.
    assert pieces.cut(never_forget, torch.arange(queries, dtype=torch.int32).view(shape)) == [(0, queries)]


def _problem(q, log_decay):
    from traformer.ops.threshold_relative.problem import Problem

    return Problem(
        q, q, q, log_decay, threshold=None, threshold_value=0.0, exclude_self=None, key_padding_mask=None,
        first_key=None, query_start=0, scale=1.0, score_bound=None, dropout_p=0.0, dropout_seed=None,
        tolerance=2**-24, needs_grad=False,
    )  # fmt: skip
