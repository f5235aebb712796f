"""What lets TRA learn recall among distractors: short trials that look at the trained length alone.

Recall at the size of `recall_in_text`, 500 of its steps, two seeds, two rates. The question is how heads are divided:
`tra_plus` reserves half of each layer's heads for the nearest kept key (`near`), and only the others look things up.
Upper layers whose heads all reach far (`far`) leave that work to the layer below. `local` is RoPE with a window of 8.

    tra sweep recall_learning --out runs/recall_learning
    tra report runs/recall_learning
"""

from __future__ import annotations

from traformer.experiments.recall_in_text import FAR, LOCAL, NO_REMOVAL, RECALL
from traformer.sweeps.cell import Cell
from traformer.types import JsonObject

TITLE = "Recall in text: which division of heads learns it"
STEPS, SEEDS, EXAMPLES = 500, (200, 201), 128
RATES = (1.25e-3, 2.5e-3)
# Name: attention of each layer, and its options.
TRIALS: dict[str, tuple[str, JsonObject]] = {
    "rope": ("rope", {}),
    "local_nope": ("rope,nope", {"rope": LOCAL}),
    "tra_plus": ("tra_plus", {}),
    "local_tra_plus": ("rope,tra_plus", {"rope": LOCAL}),
    "local_no_removal": ("rope,tra_plus_no_removal", {"rope": LOCAL}),
    "local_far": ("rope,tra_straight_through", {"rope": LOCAL, "tra_straight_through": FAR}),
    "near_far": ("tra_plus,tra_straight_through", {"tra_straight_through": FAR}),
    "near_far_no_removal": ("tra_plus_no_removal,tra_variant", {"tra_variant": {**FAR, **NO_REMOVAL}}),
}


def cells() -> list[Cell]:
    """Every division at every rate."""
    return [
        Cell(
            f"{name}-lr{rate:g}-seed{seed}",
            RECALL.replace(attention=attention, attention_options=options, lr=rate, seed=seed, steps=STEPS),
            str(RECALL.task_options["length"]),
            EXAMPLES,
        )
        for name, (attention, options) in TRIALS.items()
        for rate in RATES
        for seed in SEEDS
    ]
