"""What `tra explore` shows: a model's attention at chosen queries, encoded so that long inputs stay a small file.

An exploration holds runs, a run holds views (one per length), a view holds the tokens, the answers, and for each head
the rows of chosen queries. A row keeps its largest weights exactly (to 1/32767), which keys the head keeps as bits,
and, for long inputs, sums over buckets of keys; contextual distances follow from the bits. reports/explore draws it.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from traformer.types import JsonObject

MAP_CELLS = 48  # a head's small map is at most so many cells wide
BUCKETS = 160  # of a row of more keys than ENTRIES
ENTRIES = 256  # largest weights of a row that are kept
LEAST_WEIGHT = 1e-4  # smaller ones are only in the buckets
_SCALE = 32767


@dataclass(frozen=True)
class HeadView:
    """One head, at every query of its view. Bytes are base64; numbers are little-endian."""

    weights: str  # per query: uint16 count, then count times (uint32 key, int16 weight * 32767), largest first
    kept: str | None  # per query: ceil(T / 8) bytes, bit j of byte b is key 8 b + j; None: the method removes no keys
    gates: list[float] | None  # per query: log decay per kept key; None: no gate
    buckets: str | None  # per query: `buckets` uint8, share of the weight times 255; None: the entries are all there is
    map: str  # cells x cells uint8: the largest weight of each block of queries and keys times 255


@dataclass(frozen=True)
class Answer:
    place: int
    predicted: int
    truth: int


@dataclass(frozen=True)
class View:
    """A sequence and what every head did at the chosen queries."""

    length: str
    tokens: list[int]
    queries: list[int]  # rising
    opening: int  # index of the query that is shown first
    sources: list[list[int]]  # per query: the keys that decide the answer it predicts
    answers: list[Answer]
    cells: int
    buckets: int
    layers: list[list[HeadView]]


@dataclass(frozen=True)
class LayerTrace:
    """What one layer did with one sequence of T tokens."""

    weights: Tensor  # [H, T, T]
    keep: Tensor | None  # bool [H, T, T]
    log_decay: Tensor | None  # [H, T]


def encode_view(
    length: str,
    tokens: Sequence[int],
    layers: Sequence[LayerTrace],
    answers: Sequence[Answer],
    sources: Mapping[int, Sequence[int]],
    *,
    most_bytes: int,
) -> View:
    """A view of at most about `most_bytes`: as many queries as fit, those that predict an answer first."""
    size = len(tokens)
    heads = sum(len(layer.weights) for layer in layers)
    cells = _cells(size, MAP_CELLS if heads <= 64 else MAP_CELLS // 2)
    entries = ENTRIES if heads <= 32 else ENTRIES // 4
    buckets = BUCKETS if size > entries else 0
    row_bytes = heads * ((size + 7) // 8 + buckets + 6 * min(entries, size) // 2) * 4 // 3
    room = max(4, (most_bytes - heads * cells * cells * 4 // 3) // max(1, row_bytes))
    queries = sorted(_queries_in_order(size, answers)[:room])
    rows = torch.tensor(queries)
    encoded = [
        [
            _encode_head(layer, head, rows, entries=entries, buckets=buckets, cells=cells)
            for head in range(len(layer.weights))
        ]
        for layer in layers
    ]
    predicting = [row for row, query in enumerate(queries) if sources.get(query)]
    return View(
        length=length,
        tokens=list(tokens),
        queries=queries,
        opening=predicting[-1] if predicting else len(queries) - 1,
        sources=[list(sources.get(query, ())) for query in queries],
        answers=list(answers),
        cells=cells,
        buckets=buckets,
        layers=encoded,
    )


def _queries_in_order(size: int, answers: Sequence[Answer]) -> list[int]:
    """Every query once: those that predict an answer, spread over the sequence first, then the others likewise."""
    predicting = sorted({answer.place - 1 for answer in answers if answer.place > 0})
    others = sorted(set(range(size)) - set(predicting))
    return [*_spread(predicting), *_spread(others)]


def _spread(values: list[int]) -> list[int]:
    """The same values, last first, then ever finer halves: any beginning of the list covers the whole evenly."""
    count = len(values)
    seen: dict[int, None] = {count - 1: None} if count else {}
    step = count
    while step >= 1:
        for place in range(0, count, step):
            seen.setdefault(place, None)
        step = step // 2 if step > 1 else 0
    return [values[place] for place in seen]


def _encode_head(layer: LayerTrace, head: int, rows: Tensor, *, entries: int, buckets: int, cells: int) -> HeadView:
    weights = layer.weights[head].float().cpu()  # [T, T]
    chosen = weights[rows].numpy()
    kept = None
    if layer.keep is not None:
        bits = np.packbits(layer.keep[head].cpu()[rows].numpy(), axis=-1, bitorder="little")
        kept = _text(bits.tobytes())
    return HeadView(
        weights=_text(b"".join(_encode_row(row, entries) for row in chosen)),
        kept=kept,
        gates=None if layer.log_decay is None else [float(g) for g in layer.log_decay[head].float().cpu()[rows]],
        buckets=_text(_bucket_sums(chosen, buckets)) if buckets else None,
        map=_text(_small_map(weights, cells)),
    )


def _encode_row(row: NDArray[np.float32], entries: int) -> bytes:
    order = np.argsort(-np.abs(row), kind="stable")[:entries]
    order = order[np.abs(row[order]) >= LEAST_WEIGHT]
    table = np.empty(len(order), dtype=[("key", "<u4"), ("weight", "<i2")])
    table["key"] = order
    table["weight"] = np.clip(np.rint(row[order] * _SCALE), -_SCALE, _SCALE)
    return len(order).to_bytes(2, "little") + table.tobytes()


def decode_rows(head: HeadView, view: View) -> list[dict[int, float]]:
    """The weights of each query's row by key: what the page reads, for tests and notebooks."""
    raw, place, rows = base64.b64decode(head.weights), 0, []
    for _ in view.queries:
        count = int.from_bytes(raw[place : place + 2], "little")
        table = np.frombuffer(raw, dtype=[("key", "<u4"), ("weight", "<i2")], count=count, offset=place + 2)
        rows.append({int(key): float(weight) / _SCALE for key, weight in table})
        place += 2 + 6 * count
    return rows


def decode_kept(head: HeadView, view: View) -> NDArray[np.bool_] | None:
    """Kept keys [queries, T] of a head that removes keys."""
    if head.kept is None:
        return None
    raw = np.frombuffer(base64.b64decode(head.kept), dtype=np.uint8).reshape(len(view.queries), -1)
    return np.unpackbits(raw, axis=-1, bitorder="little")[:, : len(view.tokens)].astype(bool)


def _bucket_sums(rows: NDArray[np.float32], buckets: int) -> bytes:
    edges = np.linspace(0, rows.shape[-1], buckets + 1).astype(int)[:-1]
    sums = np.add.reduceat(np.abs(rows), edges, axis=-1)
    levels: NDArray[np.uint8] = np.rint(255 * np.clip(sums, 0, 1)).astype(np.uint8)
    return levels.tobytes()


def _cells(size: int, most: int) -> int:
    """How many blocks of equal size cover the tokens, at most `most`; the last block may be shorter."""
    return math.ceil(size / math.ceil(size / most))


def _small_map(weights: Tensor, cells: int) -> bytes:
    size = math.ceil(len(weights) / cells)
    side = size * cells
    padded = torch.nn.functional.pad(weights.abs(), (0, side - len(weights), 0, side - len(weights)))
    blocks = padded.view(cells, size, cells, size).amax((1, 3))
    return (255 * blocks.clamp(0, 1)).round().to(torch.uint8).numpy().tobytes()


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")


@dataclass(frozen=True)
class Growth:
    """What several sequences of one length show: means over the answers that come after the part that grows."""

    tokens: int
    weight: float  # the most that any head has on the keys that decide an answer
    right: float  # share of the answers that are predicted right
    sequences: int


@dataclass(frozen=True)
class RunView:
    """One run on the page."""

    label: str
    summary: str
    trained: int  # tokens of its longest training sequence
    layers: int
    heads: int
    opening: tuple[int, int]  # layer and head shown first: in the longest input it looks most at the deciding keys
    views: list[View]
    growth: list[Growth]


@dataclass(frozen=True)
class Exploration:
    """What a page shows: runs side by side, each at the same sequences."""

    title: str
    runs: list[RunView]
    vocabulary: dict[int, str]  # of the tokens that occur
    is_grown: bool = False  # whether all lengths show one example with ever more irrelevant tokens

    def to_dict(self) -> JsonObject:
        """As JSON holds it."""
        return asdict(self)
