"""Language modelling: trained at a window of 128, read at 128 to 4096; TRA beside its peers and its recipe, two seeds.

The text is the built-in python-stdlib, or what $TRAFORMER_TEXT names (a folder, or wikitext-103-raw). Bytes, 4 layers
of 128, 1,500 steps of 32 windows: some twelve minutes a cell on one core.
"""

from __future__ import annotations

import os

from traformer.experiments.configs import TEXT_SMALL
from traformer.sweeps.cell import Cell

TITLE = "Perplexity by window: trained at 128 tokens"
ATTENTIONS = ("tra", "rope", "alibi", "nope", "fot", "tra_straight_through", "tra_plus")
SEEDS = (0, 1)
WINDOWS = "128,256,512,1024,2048,4096"
EXAMPLES = 64  # the first 524,288 bytes of the validation text, the same at every window


def cells() -> list[Cell]:
    """Seven attentions, two seeds; the first seed of all of them first."""
    place = os.environ.get("TRAFORMER_TEXT", TEXT_SMALL.task_options["data"][0])
    options = {**TEXT_SMALL.task_options, "data": [place]}
    return [
        Cell(
            f"text-{name}-seed{seed}",
            TEXT_SMALL.replace(task_options=options, attention=name, seed=seed, threads=1),
            WINDOWS,
            EXAMPLES,
        )
        for seed in SEEDS
        for name in ATTENTIONS
    ]
