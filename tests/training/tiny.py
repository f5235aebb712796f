"""A run small enough to train in a second, with dropout on."""

from __future__ import annotations

from typing import Any

from traformer.runs.config import RunConfig


def tiny_config(**changes: Any) -> RunConfig:
    settings: dict[str, Any] = {
        "task": "flip_flop",
        "task_options": {"length": 12},
        "attention": "tra",
        "preset": "tiny",
        "model_options": {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "attention_dropout": 0.1,
            "hidden_dropout": 0.1,
        },
        "steps": 12,
        "batch_size": 8,
        "lr": 1e-2,
        "log_every": 5,
        "save_every": 4,
        "keep": 2,
        "threads": 1,
    }
    return RunConfig(**{**settings, **changes})


def without_dropout(**changes: Any) -> RunConfig:
    config = tiny_config(**changes)
    return config.replace(model_options={**config.model_options, "attention_dropout": 0.0, "hidden_dropout": 0.0})
