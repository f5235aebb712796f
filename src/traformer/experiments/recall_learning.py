"""What lets TRA learn recall among distractors: short trials that look at the trained length alone.

Recall at the size and with the steps of `recall_in_text`, one rate, three seeds. Two questions. How are heads divided?
`tra_plus` reserves half of each layer's heads for the nearest kept key (`near`), and only the others look things up.
Upper layers whose heads all reach far (`far`) leave that work to the layer below. `local` is RoPE with a window of 8.
And does it matter that short examples, with next to no text between the pairs, come first (`curriculum`)?

    tra sweep recall_learning --out runs/recall_learning --records results/recall_learning/records.jsonl
    tra report runs/recall_learning
    python -m traformer.experiments.summary recall_learning runs/recall_learning results/recall_learning \
        docs/evidence_recall.md
"""

from __future__ import annotations

from pathlib import Path

from traformer.experiments.recall_in_text import FAR, LOCAL, NO_REMOVAL, RECALL
from traformer.runs.folder import RunFolder
from traformer.storage import make_folder, write_atomically
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
SHOWN_AS = {"local_far": "rope_local_far"}  # `local_far` of the copy experiments has another lower layer


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


def table(out: Path) -> str:
    """A line for each division of heads: each seed's share of right answers at the trained length, by order."""
    found: dict[tuple[str, str], list[float]] = {}
    for cell in cells():
        name, order, _ = cell.name.rsplit("-", 2)
        for one in RunFolder(out / cell.name).results.read() if RunFolder(out / cell.name).is_run() else []:
            if (one.metric, one.split) == ("token_accuracy", "fixed") and one.value is not None:
                found.setdefault((name, order), []).append(one.value)
    heads = " | ".join(order.replace("_", " ") for order in CURRICULA)
    lines = [f"| right answers at 128 tokens, in %, seed by seed | {heads} |", "|---" * (len(CURRICULA) + 1) + "|"]
    for name in dict.fromkeys(name for name, _ in found):
        shown = (", ".join(f"{100 * x:.0f}" for x in found.get((name, order), [])) for order in CURRICULA)
        lines.append(f"| `{SHOWN_AS.get(name, name)}` | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def write_summary(out: Path, folder: Path) -> None:
    """table.md; there are no hypotheses, and so no verdicts."""
    make_folder(folder)
    write_atomically(folder / "table.md", table(out))
