"""Measured runs without a model, for reports."""

from __future__ import annotations

from tests.training.tiny import tiny_config
from traformer.runs.folder import RunFolder
from traformer.runs.measurements import Measurement


def make_run(path, values, attention="tra", split="iid", metric="exact_match", **changes):
    """A run whose metric is `values` at 12, 24, 48, ... tokens."""
    config = tiny_config(attention=attention, **changes)
    folder = RunFolder(path)
    folder.write_config(config, {"device": "cpu", "threads": 1})
    folder.results.write(
        [
            measurement(config, 12 * 2**place, value, metric, split=split, chance=0.25 if split == "iid" else None)
            for place, value in enumerate(values)
        ]
    )
    lines = [f'{{"step": {step}, "loss": {1.0 / step}, "accuracy": 0.5, "tokens": {step * 90}}}' for step in (4, 8, 12)]
    folder.metrics_file.write_text("\n".join(lines) + "\n")
    return folder


def measurement(config, length, value, metric="exact_match", **changes):
    low, high = (None, None) if value is None else (max(0.0, value - 0.1), min(1.0, value + 0.1))
    settings = {
        "task": config.task, "split": "iid", "length": length, "metric": metric, "value": value, "low": low,
        "high": high, "examples": 64, "counted": 64, "seed": config.seed, "attention": config.attention,
        "step": config.steps, "train_length": 12,
    }  # fmt: skip
    return Measurement(**{**settings, **changes})
