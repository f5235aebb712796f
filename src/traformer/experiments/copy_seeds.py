"""Why one seed copies and another does not: TRA, its recipe and RoPE on unique copy, four seeds, every 50th step kept.

The setting of the `peers` table with three times its steps; the second command follows the heads while they form:

    tra sweep copy_seeds --out runs/copy_seeds
    tra diagnose runs/copy_seeds/copy-tra* --steps all --lengths 6 --out results/copy_seeds
"""

from __future__ import annotations

from traformer.experiments import peers
from traformer.sweeps.cell import Cell

TITLE = "Copy: four seeds of TRA, of its recipe and of RoPE"
METHODS = ("tra", "tra_plus", "rope")
STEPS = 1500
SAVE_EVERY = 50


def cells() -> list[Cell]:
    """Seed by seed; the learning rates are those of the table."""
    config, lengths = peers.TASKS["copy"]
    rates = peers.learning_rates().get("copy", {})
    return [
        Cell(
            f"copy-{method}-seed{seed}",
            config.replace(
                attention=method,
                seed=seed,
                lr=rates.get(method, peers.DEFAULT_LR),
                steps=STEPS,
                save_every=SAVE_EVERY,
                keep=STEPS // SAVE_EVERY,
            ),
            lengths,
            peers.EXAMPLES,
        )
        for seed in peers.SEEDS
        for method in METHODS
    ]
