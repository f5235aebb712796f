"""Language modelling: trained at a window of 128, read at 128 to 4096; TRA beside its peers, two seeds.

The text is ../shared/data (its training files, and WikiText-103's validation split), or the folder that
$TRAFORMER_TEXT names. Each cell takes about an hour on one core, so two at a time as long as one on two cores.
"""

from __future__ import annotations

import os

from traformer.experiments.cell import Cell
from traformer.experiments.configs import TEXT_LAPTOP

TITLE = "Perplexity by window: trained at 128 tokens"
ATTENTIONS = ("tra", "rope", "alibi", "nope", "fot")
SEEDS = (0, 1)
WINDOWS = "128,256,512,1024,2048,4096"


def cells() -> list[Cell]:
    """Five attentions, two seeds; the first seed of all of them first."""
    place = os.environ.get("TRAFORMER_TEXT", TEXT_LAPTOP.task_options["data"][0])
    options = {**TEXT_LAPTOP.task_options, "data": [place]}
    return [
        Cell(
            f"text-{name}-seed{seed}",
            TEXT_LAPTOP.replace(task_options=options, attention=name, seed=seed, threads=1),
            WINDOWS,
            256,
        )
        for seed in SEEDS
        for name in ATTENTIONS
    ]
