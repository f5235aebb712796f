"""Copy to 16 times the trained length with batches four times as large, chosen by errors at the trained length.

`copy_wide` shows that `local_far` errs at the same rate per comparison of a query with a symbol from the trained length
to 16 times that, so what it lacks at 16 times can be seen, and improved, at the trained length. The loss cannot show
it, since nearly every string is right; the number of wrong ones among many can. Trained to 6 symbols at 5e-3 (seed 213,
which is not used here), wrong of 50,000 strings of 6 symbols (results/copy_batch/choices.csv): 7 with the batches of 64
and 3,000 steps of `copy_recipe`, 9 without weight decay, 2 with 10,000 steps, 1 with batches of 256. Nothing longer was
looked at. So a batch has 256 strings here, and nothing else differs from `copy_recipe`.

The rates are those that the rule of `copy_wide` takes from the searches of `copy_recipe`: the middle one of those that
solve the trained length. The question is the goal alone, so there are no rivals. Seeds 60 to 64 are used nowhere else.

    tra sweep copy_batch --out runs/copy_batch --records results/copy_batch/records.jsonl
    tra report runs/copy_batch --experiment copy_batch
    python -m traformer.experiments.summary copy_batch runs/copy_batch results/copy_batch docs/evidence_copy.md
"""

from __future__ import annotations

from traformer.experiments.copy_recipe import LOCAL_FAR, LOCAL_RIVALS, copy_of, goals
from traformer.experiments.copy_wide import LENGTHS
from traformer.experiments.protocol import Protocol, Setting

TITLE = "Copy: larger batches, to 16 times the trained length"

RATES = {6: 5e-3, 20: 2.5e-3}


def _setting(longest: int) -> Setting:
    return Setting(f"batch_{longest}", copy_of(longest).replace(batch_size=256), LENGTHS[longest], rate=RATES[longest])


PROTOCOL = Protocol(
    settings={setting.name: setting for setting in map(_setting, RATES)},
    waves=(("batch_6", (LOCAL_FAR,)), ("batch_20", (LOCAL_FAR,))),
    hypotheses=(
        *goals("batch_6", 6, 19, LOCAL_FAR, LOCAL_RIVALS)[:2],
        *goals("batch_20", 20, 21, LOCAL_FAR, LOCAL_RIVALS)[:2],
    ),
    seeds=(60, 61, 62, 63, 64),
)

cells, next_cells, verdicts = PROTOCOL.cells, PROTOCOL.next_cells, PROTOCOL.verdicts
