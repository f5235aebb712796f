"""Copy to 16 times the trained length with one method in both layers: `tra_previous`.

`copy_batch` and `copy_longer` reach 99 % at 8 times and 95 % at 16 times the trained length with a stack of two methods
whose lower layer sees two tokens, and which therefore does not learn strings whose symbols recur. In `tra_previous`
half of each layer's heads read the previous token and the others are those of `tra_plus`, so it is a layer for any
stack, and it learns such strings (`tra reproduce copy --scale laptop`). Does it copy as far?

Batches of 256 and the rates of `copy_batch`; 6,000 steps as in `copy_longer` when trained to 6 symbols, 3,000 as in
`copy_batch` when trained to 20. Nothing has been searched or chosen anew. `fot_previous` is FoT with the same heads.
Seeds 90 to 94 are used nowhere else.

    tra sweep copy_previous --out runs/copy_previous --records results/copy_previous/records.jsonl
    tra report runs/copy_previous --experiment copy_previous
    python -m traformer.experiments.summary copy_previous runs/copy_previous results/copy_previous docs/evidence_copy.md
"""

from __future__ import annotations

from traformer.experiments.copy_batch import RATES
from traformer.experiments.copy_recipe import copy_of, goals
from traformer.experiments.copy_wide import LENGTHS
from traformer.experiments.protocol import Protocol, Setting, arms

TITLE = "Copy: heads that read the previous token in every layer, to 16 times the trained length"

STEPS = {6: 6000, 20: 3000}


def _setting(longest: int) -> Setting:
    config = copy_of(longest).replace(batch_size=256, steps=STEPS[longest])
    return Setting(f"previous_{longest}", config, LENGTHS[longest], rate=RATES[longest])


(EXACT,) = arms("tra_previous")
RIVALS = arms("fot_previous")

PROTOCOL = Protocol(
    settings={setting.name: setting for setting in map(_setting, RATES)},
    waves=(
        ("previous_6", (EXACT,)),
        ("previous_20", (EXACT,)),
        ("previous_6", RIVALS),
        ("previous_20", RIVALS),
    ),
    hypotheses=(
        *goals("previous_6", 6, 29, EXACT, RIVALS),
        *goals("previous_20", 20, 32, EXACT, RIVALS),
    ),
    seeds=(90, 91, 92, 93, 94),
)

cells, next_cells, verdicts = PROTOCOL.cells, PROTOCOL.next_cells, PROTOCOL.verdicts
