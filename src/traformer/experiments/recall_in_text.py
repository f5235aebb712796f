"""Recall in real text, trained to 128 tokens and tested to 8,192, under the protocol of `protocol.py`.

Two layers of 128, four heads of 64; sequences of 48 to 128 tokens with 2 to 6 pairs of 32 keys and 32 values; 1,000
steps of 64. At every length the six pairs of training stand in ever more text (split `fixed`), and, as far as there are
keys, pairs in proportion (split `growing`). The text is the built-in one, or the folder that $TRAFORMER_TEXT names.
128 sequences for each length, each with six answers: 512 of 8,192 tokens would cost a quarter of an hour for every
run of a quadratic method. `tra stretch` reads a run at longer lengths.

    tra sweep recall_in_text --out runs/recall_in_text
    tra report runs/recall_in_text --experiment recall_in_text
"""

from __future__ import annotations

import os
from pathlib import Path

from traformer.experiments.protocol import AtLeast, Beats, Hypothesis, Place, Protocol, Setting, Verdict, arms
from traformer.runs.config import RunConfig
from traformer.sweeps.cell import Cell

TITLE = "Recall in text: trained to 128 tokens, tested to 8,192"

LENGTHS = "128,512,2048,8192"
RECALL = RunConfig(
    task="recall",
    task_options={
        "data": [os.environ.get("TRAFORMER_TEXT", "python-stdlib")], "length": 128, "min_length": 48, "pairs": 6,
        "keys": 32, "values": 32,
    },
    preset="tiny",
    model_options={
        "num_attention_heads": 4, "head_dim": 64, "attention_dropout": 0.0, "hidden_dropout": 0.0,
    },
    steps=1000, batch_size=64, clip=1.0, log_every=50, save_every=250, keep=1, threads=1,
)  # fmt: skip

EQUAL = ("rope_equal", "fot_equal")
PLACE_64X = Place("recall", "fixed", 128 * 64)

HYPOTHESES: tuple[Hypothesis, ...] = (
    AtLeast("H1", "tra_plus recalls 90 % at 64 times the trained length, with as many pairs in more text", "tra_plus",
            (PLACE_64X,), 0.9),
    Beats("H2", "and is 10 points better than every arm with the equal recipe", "tra_plus", EQUAL, (PLACE_64X,), 0.1),
    Beats("H3", "and 10 points better than itself without removal", "tra_plus", ("tra_plus_no_removal",), (PLACE_64X,),
          0.1),
)  # fmt: skip

PROTOCOL = Protocol(
    settings={"recall": Setting("recall", RECALL, LENGTHS, "token_accuracy")},
    waves=(
        ("recall", arms("tra_plus", "rope_equal", "tra_plus_no_removal", "fot_equal")),
        ("recall", arms("tra", "rope_window", "asentmax", "lstm")),
    ),
    hypotheses=HYPOTHESES,
    rates=(6.25e-4, 1.25e-3, 2.5e-3, 5e-3),
    examples=128,
)


def cells() -> list[Cell]:
    """The first cells; `next_cells` gives those that follow from what they measure."""
    setting, wave = PROTOCOL.waves[0]
    return [cell for arm in wave for rate in PROTOCOL.rates for cell in PROTOCOL.search_cells(setting, arm, rate)]


def next_cells(out: Path, failed: list[str]) -> list[Cell]:
    return PROTOCOL.next_cells(out, failed)


def verdicts(out: Path) -> list[Verdict]:
    return PROTOCOL.verdicts(out)
