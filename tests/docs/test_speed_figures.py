"""The speeds in docs/kernel.md and docs/results.md are those of the committed benchmarks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.docs.test_figures import RESULTS, tables

ROWS = {  # a row of the table -> (length, decay, method)
    "T 256 (B 64, H 4), every key, as at the start": (256, "init", "tra_full"),
    "T 512 (B 16, H 4), every key, as at the start": (512, "init", "tra_full"),
    "T 2,048 (B 1, H 8), never forget": (2048, "long", "tra"),
    "T 4,096 (B 1, H 8), never forget": (4096, "long", "tra"),
    "T 32,768 (B 1, H 2), never forget": (32768, "long", "tra"),
    "T 4,096 (B 1, H 8), as at the start": (4096, "init", "tra"),
    "T 32,768 (B 1, H 2), as at the start": (32768, "init", "tra"),
}


def speeds(file: Path) -> dict[tuple[int, str, str, str], float]:
    """(length, decay, method, pass) -> times SDPA's speed."""
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    return {
        (row["length"], row["decay"], row["method"], row["pass"]): row["ratio"]
        for row in rows
        if "ratio" in row and "method" in row
    }


@pytest.mark.parametrize(("column", "name"), [(1, "amd-avx512"), (2, "amd-avx512-mkl")])
def test_the_kernel_on_amd_with_avx512(column, name):
    (table,) = tables("docs/kernel.md", "times as fast as SDPA, forward / both")
    found = speeds(RESULTS / "attention_bench" / f"{name}.json")
    shown = 0
    for row in table:
        if row[0] not in ROWS or not row[column]:
            continue
        length, decay, method = ROWS[row[0]]
        for text, direction in zip(row[column].split(" / "), ("forward", "both"), strict=True):
            digits = len(text.partition(".")[2])
            assert f"{found[length, decay, method, direction]:.{digits}f}" == text, row
            shown += 1
    assert shown == {1: 14, 2: 10}[column]


def test_a_training_step_of_eager_methods():
    methods = ("stick_breaking", "cope", "asentmax", "tra_forget_distance", "tra_plus_no_removal")
    (table,) = tables("docs/peers.md", "window||stick-breaking")
    assert len(table) == 4
    for window, when, *cells in table:
        name = "before" if when == "before" else "after"
        rows = json.loads((RESULTS / "bench_train_eager" / f"{name}_{window.replace(',', '')}.json").read_text())[
            "rows"
        ]
        ratios = {row["attention"]: f"{row['ratio']:.2f}" for row in rows}
        assert cells == [ratios[method] for method in methods]
