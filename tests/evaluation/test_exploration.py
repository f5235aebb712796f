"""The encoding of an exploration: what the page reads is what the layers did."""

from __future__ import annotations

import numpy as np
import torch

from traformer.evaluation.exploration import (
    LEAST_WEIGHT,
    Answer,
    LayerTrace,
    View,
    decode_kept,
    decode_rows,
    encode_view,
)


def drawn(heads: int, size: int, seed: int = 0) -> LayerTrace:
    """A causal map with removed keys."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(heads, size, size, generator=generator)
    visible = torch.ones(size, size, dtype=torch.bool).tril()
    keep = visible & (scores > 0)
    weights = torch.where(keep, scores.exp(), 0.0)
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-9)
    return LayerTrace(weights, keep, -torch.rand(heads, size, generator=generator))


def encoded(size: int, most_bytes: int, heads: int = 3) -> tuple[LayerTrace, View]:
    trace = drawn(heads, size)
    answers = [Answer(place, 1, 2) for place in range(7, size, 11)]
    return trace, encode_view("x", list(range(size)), [trace], answers, {6: [2]}, most_bytes=most_bytes)


def test_a_short_input_is_kept_whole() -> None:
    trace, view = encoded(50, 1_000_000)
    assert view.queries == list(range(50)) and view.buckets == 0
    for head, coded in enumerate(view.layers[0]):
        kept = decode_kept(coded, view)
        assert kept is not None and np.array_equal(kept, trace.keep[head].numpy())  # type: ignore[index]
        for query, row in enumerate(decode_rows(coded, view)):
            exact = trace.weights[head, query]
            for key in range(50):
                assert abs(row.get(key, 0.0) - float(exact[key])) <= max(LEAST_WEIGHT, 1 / 32767)
        assert coded.gates is not None and torch.allclose(torch.tensor(coded.gates), trace.log_decay[head])  # type: ignore[index]


def test_the_first_query_shown_has_a_source() -> None:
    _, view = encoded(50, 1_000_000)
    assert view.queries[view.opening] == 6 and view.sources[view.opening] == [2]


def test_a_long_input_keeps_its_largest_weights_and_bucket_sums_and_stays_small() -> None:
    trace, view = encoded(700, 60_000)
    text = sum(len(head.weights) + len(head.kept or "") + len(head.buckets or "") for head in view.layers[0])
    assert text < 90_000 and 4 <= len(view.queries) < 700
    assert {answer.place - 1 for answer in view.answers} >= set(view.queries)  # answers come first
    for head, coded in enumerate(view.layers[0]):
        for query, row in zip(view.queries, decode_rows(coded, view), strict=True):
            exact = trace.weights[head, query]
            best = int(exact.argmax())
            assert abs(row[best] - float(exact[best])) < 1e-4
            assert all(abs(value - float(exact[key])) < 1e-4 for key, value in row.items())


def test_a_budget_too_small_for_anything_still_shows_four_queries_over_the_whole_sequence() -> None:
    _, view = encoded(300, 10)
    assert len(view.queries) == 4
    assert view.queries[-1] - view.queries[0] > 150
