"""From the diagnosis of all heads to the two that matter: the reading and the marking head. Loads without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from traformer.runs.measurements import Measurement

Head = tuple[int, int]  # layer and head


@dataclass(frozen=True)
class HeadSummary:
    """One step and length of a run. Numbers are of the reading head but for those of the marking head."""

    task: str
    attention: str
    seed: int
    step: int
    length: int
    train_length: int
    reading_head: Head
    source_weight: float
    residue: float
    positive_keys: float
    gate_decay: float | None
    marking_head: Head
    marks: float
    marking_positive: float
    marking_decay: float | None
    lifted_pairs: float  # over all heads
    lift_in_nats: float


def of_heads(measurements: Sequence[Measurement]) -> list[Measurement]:
    return [one for one in measurements if "head" in one.at]


def head_of(one: Measurement) -> Head:
    return int(one.at["layer"]), int(one.at["head"])


def chosen_heads(measurements: Sequence[Measurement]) -> tuple[Head, Head] | None:
    """The reading and the marking head of a run, chosen at its newest step and shortest length.

    Reading: most weight on the source, so that its residue decides the answer. Marking: when the source is the query,
    most weight on the key before it, among the layers below the reading head (if there are any).
    """
    heads = [one for one in of_heads(measurements) if one.value is not None]
    if not heads:
        return None
    newest = max(one.step for one in heads)
    shortest = min(one.size for one in heads if one.step == newest)
    here = [one for one in heads if (one.step, one.size) == (newest, shortest)]
    source = {head_of(one): one.value or 0.0 for one in here if one.metric == "source_weight"}
    marks = {head_of(one): one.value or 0.0 for one in here if one.metric == "marks"}
    if not source or not marks:
        return None
    reading = max(source, key=lambda head: source[head])
    below = [head for head in marks if head[0] < reading[0]] or list(marks)
    return reading, max(below, key=lambda head: marks[head])


def head_summaries(measurements: Sequence[Measurement]) -> list[HeadSummary]:
    """One per step and length of one run, the same two heads followed through all of them."""
    chosen = chosen_heads(measurements)
    if chosen is None:
        return []
    reading, marking = chosen
    cells: dict[tuple[int, int], dict[tuple[str, Head | None], Measurement]] = {}
    for one in measurements:
        if "distance" not in one.at:
            head = head_of(one) if "head" in one.at else None
            cells.setdefault((one.step, one.size), {})[one.metric, head] = one
    result = []
    for (step, length), found in sorted(cells.items()):

        def value(
            metric: str, head: Head | None, found: dict[tuple[str, Head | None], Measurement] = found
        ) -> float | None:
            one = found.get((metric, head))
            return None if one is None else one.value

        first = found.get(("source_weight", reading))
        if first is None:
            continue
        result.append(
            HeadSummary(
                task=first.task,
                attention=first.attention,
                seed=first.seed,
                step=step,
                length=length,
                train_length=first.train_length,
                reading_head=reading,
                source_weight=first.value or 0.0,
                residue=value("residue", reading) or 0.0,
                positive_keys=value("positive_keys", reading) or 0.0,
                gate_decay=value("gate_decay", reading),
                marking_head=marking,
                marks=value("marks", marking) or 0.0,
                marking_positive=value("positive_keys", marking) or 0.0,
                marking_decay=value("gate_decay", marking),
                lifted_pairs=value("lifted_pairs", None) or 0.0,
                lift_in_nats=value("lift_in_nats", None) or 0.0,
            )
        )
    return result
