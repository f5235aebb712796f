"""The demo's two flip-flop runs, from the trained length to the farthest that `tra stretch` has read: one figure, drawn
from the committed results/demo/report.csv and results/stretch/stretch.json."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

from traformer.methods import label_of
from traformer.reports.figures import Figure, Point, Series
from traformer.runs.legacy import legacy_measurements
from traformer.runs.metrics import METRICS

TASK, SPLIT = "flip_flop", "sparse"  # where what is to be remembered is farthest away
ATTENTIONS = ("tra", "rope")


def farthest(results: Path) -> Figure | None:
    """The share of reads that are right, by length; None where the results are not there."""
    near, far = results / "demo" / "report.csv", results / "stretch" / "stretch.json"
    if not near.exists() or not far.exists():
        return None
    points: dict[str, list[Point]] = {attention: [] for attention in ATTENTIONS}
    trained = 0
    with open(near, encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            if (row["task"], row["split"], row["metric"]) == (TASK, SPLIT, "token_accuracy"):
                trained = int(row["train_length"])
                value, low, high, guess = (float(row[name]) for name in ("value", "low", "high", "chance"))
                size, examples = float(row["length"]), int(row["examples"])
                points[row["attention"]].append(Point(size, row["length"], value, low, high, 1, examples, guess))
    chance = points[ATTENTIONS[0]][0].chance
    stopped = ""
    for found in legacy_measurements(far).values():
        for one in found:
            if (one.task, one.split, one.metric) == (TASK, SPLIT, "exact_match") and one.value is None:
                stopped = f"; {label_of(one.attention)} ran out of time at {one.size:,}"
            if (one.task, one.split, one.metric) == (TASK, SPLIT, "error_per_read") and one.value is not None:
                right, least = 1 - one.value, None if one.high is None else 1 - one.high
                point = Point(float(one.size), f"{one.size:,}", right, least, right, 1, one.examples, chance)
                points[one.attention].append(point)
    series = [
        Series(label_of(attention), attention, sorted(points[attention], key=lambda point: point.x))
        for attention in ATTENTIONS
    ]
    metric = replace(METRICS["token_accuracy"], label="reads right")
    x_label = f"tokens, log scale; one seed{stopped}"
    return Figure(metric, TASK, SPLIT, "accuracy", trained, float(trained), x_label, series)
