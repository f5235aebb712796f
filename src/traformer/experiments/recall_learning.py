"""What lets TRA learn recall among distractors: short trials that look at the trained length alone.

Recall at the size and with the steps of `recall_in_text`, one rate, three seeds. Two questions. How are heads divided?
`tra_plus` reserves half of each layer's heads for the nearest kept key (`near`), and only the others look things up.
Upper layers whose heads all reach far (`far`) leave that work to the layer below. `local` is RoPE with a window of 8.
And does it matter that short examples, with next to no text between the pairs, come first (`curriculum`)?

    tra sweep recall_learning --out runs/recall_learning --records results/recall_learning/records.jsonl
    tra report runs/recall_learning
"""

from __future__ import annotations

from traformer.experiments.recall_in_text import FAR, LOCAL, NO_REMOVAL, RECALL
from traformer.sweeps.cell import Cell
from traformer.types import JsonObject

TITLE = "Recall in text: what learns it"
SEEDS, EXAMPLES, RATE = (200, 201, 202), 128, 2.5e-3
CURRICULA = {"all_lengths": 0.0, "curriculum": 0.5}
# Name: attention of each layer, and its options.
TRIALS: dict[str, tuple[str, JsonObject]] = {
    "near_far": ("tra_plus,tra_straight_through", {"tra_straight_through": FAR}),
    "tra_plus": ("tra_plus", {}),
    "tra": ("tra", {}),
    "near_far_no_removal": ("tra_plus_no_removal,tra_variant", {"tra_variant": {**FAR, **NO_REMOVAL}}),
    "local_far": ("rope,tra_straight_through", {"rope": LOCAL, "tra_straight_through": FAR}),
    "local_nope": ("rope,nope", {"rope": LOCAL}),
    "rope": ("rope", {}),
}


def cells() -> list[Cell]:
    """Every division, with and without a curriculum."""
    return [
        Cell(
            f"{name}-{order}-seed{seed}",
            RECALL.replace(attention=attention, attention_options=options, lr=RATE, seed=seed, curriculum=share),
            str(RECALL.task_options["length"]),
            EXAMPLES,
        )
        for name, (attention, options) in TRIALS.items()
        for order, share in CURRICULA.items()
        for seed in SEEDS
    ]
