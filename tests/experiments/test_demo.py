"""The demo's promise, for every seed that is tried. Slow: trains four models."""

from __future__ import annotations

import pytest

from traformer.experiments import demo
from traformer.sweeps.local import run_sweep


@pytest.mark.slow
def test_tra_stays_right_on_flip_flop_at_eight_times_the_length_for_every_seed(tmp_path):
    cells = []
    for seed in range(4):
        (cell,) = [c for c in demo.cells(seed) if (c.config.task, c.config.attention) == ("flip_flop", "tra")]
        cells.append(type(cell)(f"seed{seed}", cell.config, cell.lengths, cell.examples))
    states = run_sweep(cells, tmp_path)
    assert [state.status for state in states] == ["done"] * 4, [state.message for state in states]
    worst = 1.0
    for state in states:
        rows = [row.to_row() for row in state.folder.results.read() if row.metric == "exact_match"]
        longest = max(row["length"] for row in rows)
        assert longest == 8 * rows[0]["train_length"]
        found = {row["split"]: row["value"] for row in rows if row["length"] == longest}
        print(f"{state.cell.name}: exact match at {longest} tokens: {found}")
        assert set(found) == {"iid", "sparse", "dense"}
        worst = min(worst, *found.values())
    assert worst >= 0.95
