"""The learning-rate search for `peers`: each method at two rates, few steps, a seed of its own.

As a program, `python -m traformer.experiments.peers_lr DIR`, it reads the finished sweep and writes the best rates
to DIR/learning_rates.json, which `peers` reads if TRAFORMER_PEERS_RATES names it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from traformer.errors import RunError
from traformer.experiments.peers import METHODS, RATES_VARIABLE, TASKS
from traformer.runs.folder import RunFolder
from traformer.storage import write_atomically
from traformer.sweeps.cell import Cell

TITLE = "Learning rates for the table of peers"
RATES = (2e-3, 5e-3)
SEED = 100
STEPS = {"flip_flop": 125, "copy": 150}
LAST_LINES = 1  # of metrics.jsonl that the loss is averaged over


def cells() -> list[Cell]:
    return [
        Cell(
            f"{task}-{method}-lr{rate:g}",
            config.replace(attention=method, seed=SEED, lr=rate, steps=STEPS[task]),
            lengths.split(",")[0],
            64,
        )
        for task, (config, lengths) in TASKS.items()
        for method in METHODS
        for rate in RATES
    ]


def choose(folder: Path) -> dict[str, dict[str, float]]:
    """task -> method -> the rate whose training loss ended lowest."""
    chosen: dict[str, dict[str, float]] = {}
    for task in TASKS:
        for method in METHODS:
            losses = {rate: _last_loss(folder / f"{task}-{method}-lr{rate:g}") for rate in RATES}
            chosen.setdefault(task, {})[method] = min(losses, key=lambda rate: losses[rate])
    return chosen


def _last_loss(path: Path) -> float:
    rows = RunFolder.open(path).read_metrics()
    if not rows:
        raise RunError(f"{path} has no metrics yet; finish the sweep first: tra sweep peers_lr --out {path.parent}")
    last = [row["loss"] for row in rows[-LAST_LINES:]]
    return sum(last) / len(last)


def main(argv: list[str]) -> int:
    if len(argv) != 1:
        print("usage: python -m traformer.experiments.peers_lr DIR", file=sys.stderr)
        return 2
    try:
        chosen = choose(Path(argv[0]))
    except RunError as error:
        print(f"tra: error: {error}", file=sys.stderr)
        return 2
    file = Path(argv[0]) / "learning_rates.json"
    write_atomically(file, json.dumps(chosen, indent=1) + "\n")
    print(f"written to {file}; use them with: {RATES_VARIABLE}={file} tra sweep peers")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
