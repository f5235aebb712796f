"""The laptop-scale table: TRA, its ablations and extensions, and its peers in one trunk, on flip-flop and unique copy.

Every method has the same decoder, data, steps and choice of learning rates; 4 seeds; exact match at 1, 2, 4 and 8
times the training length. Two layers of 64, some 20 to 60 seconds a cell on one core. Two commands, both resumable:

    tra sweep peers_lr --out runs/peers_lr && python -m traformer.experiments.peers_lr runs/peers_lr
    TRAFORMER_PEERS_RATES=runs/peers_lr/learning_rates.json tra sweep peers --out runs/peers

The first trains each method for 125 or 150 steps at two rates with a seed of its own, and writes down the
rate with the lowest loss on the training distribution; nothing beyond the training length is looked at. Without the
variable, the rates are those that this project found, which are shipped with it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from traformer.errors import InputError
from traformer.methods import ABLATION, EXTENSION, names_of_kind
from traformer.runs.config import RunConfig
from traformer.sweeps.cell import Cell

TITLE = "TRA, its ablations, its extensions and its peers in the same decoder"

PEERS = ("rope", "nope", "alibi", "cope", "fot", "stick_breaking")
LATER = ("tra_far", "tra_sharpening")  # named after the table was run
METHODS = ("tra", *PEERS, *(name for name in names_of_kind(ABLATION, EXTENSION) if name not in LATER))
SEEDS = (0, 1, 2, 3)
DEFAULT_LR = 3e-3
RATES_VARIABLE = "TRAFORMER_PEERS_RATES"  # a file that `python -m traformer.experiments.peers_lr` has written
SHIPPED_RATES = Path(__file__).with_name("peers_learning_rates.json")

_COMMON = RunConfig(
    preset="tiny", lr=DEFAULT_LR, log_every=50, save_every=1000, keep=1, threads=1, clip=1.0,
    model_options={
        "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
        "attention_dropout": 0.0, "hidden_dropout": 0.0,
    },
)  # fmt: skip
# No dropout: it would push torch's attention off its fused path on a CPU and treat the methods unequally.
TASKS: dict[str, tuple[RunConfig, str]] = {
    "flip_flop": (
        _COMMON.replace(
            task="flip_flop",
            task_options={"length": 32},
            model_options={**_COMMON.model_options, "head_dim": 32},
            batch_size=32,
            steps=400,
        ),
        "32,64,128,256",
    ),
    "copy": (
        _COMMON.replace(
            task="copy",
            task_options={"max_length": 6, "alphabet": "unique", "vocabulary": 48},
            model_options={**_COMMON.model_options, "head_dim": 64},
            batch_size=64,
            steps=500,
        ),
        "6,12,24,48",
    ),
}
EXAMPLES = 128


def learning_rates() -> dict[str, dict[str, float]]:
    """task -> method -> rate, as the search found them."""
    file = Path(os.environ.get(RATES_VARIABLE) or SHIPPED_RATES)
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise InputError(
            f"{file}, which {RATES_VARIABLE} names, is not a file of learning rates; make it with: "
            "python -m traformer.experiments.peers_lr DIR"
        ) from None


def cells() -> list[Cell]:
    """Seed by seed, so that an interrupted table has whole columns."""
    found = learning_rates()
    return [
        Cell(
            f"{task}-{method}-seed{seed}",
            config.replace(attention=method, seed=seed, lr=found.get(task, {}).get(method, DEFAULT_LR)),
            lengths,
            EXAMPLES,
        )
        for seed in SEEDS
        for task, (config, lengths) in TASKS.items()
        for method in METHODS
    ]
