"""Ahead-of-time compilation without a GPU: what results/gpu/compiled.json says holds, and every kernel compiles."""

import json
import os
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs triton's compiler", allow_module_level=True)

from traformer.benchmarks.predict import PER_SCORE
from traformer.ops.threshold_relative.triton.compilation import (
    ARCHITECTURES,
    IDENTITY,
    KERNELS,
    WALKS,
    compile_kernel,
    record,
)
from traformer.ops.threshold_relative.triton.ptx import count_instructions, tile_instructions

TABLE = Path(__file__).parents[3] / "results" / "gpu" / "compiled.json"
ROWS = json.loads(TABLE.read_text(encoding="utf-8"))["rows"]


def test_the_table_covers_every_kernel_and_architecture():
    for architecture in ARCHITECTURES:
        for kernel in KERNELS:
            for dtype, size in (("bf16", 64), ("bf16", 128), ("bf16", 256), ("fp16", 64), ("fp32", 64), ("fp32", 128)):
                found = [r for r in ROWS if [r[n] for n in IDENTITY] == [kernel, dtype, size, architecture, "tra_plus"]]
                assert len(found) == 1, (kernel, dtype, size, architecture)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_shared_memory_and_spills(architecture):
    for row in (r for r in ROWS if r["architecture"] == architecture):
        assert row["shared"] <= ARCHITECTURES[architecture][3], row
        if row["head_size"] <= 128 and row["options"] == "tra_plus":
            assert row["spills"] == 0, row


def expected(kernel, dtype, size, architecture):
    return next(r for r in ROWS if [r[n] for n in IDENTITY] == [kernel, dtype, size, architecture, "tra_plus"])


# A short set for every change: what training and decoding in bf16 at head size 64 use, each on one architecture.
QUICK = [("forward", "sm_80"), ("query_gradient", "sm_90"), ("key_gradient", "sm_80"), ("decode", "gfx942")]


def check(kernel, dtype, size, architecture):
    compiled = compile_kernel(kernel, dtype, size, architecture)
    row, known = record(compiled), expected(kernel, dtype, size, architecture)
    assert (row["rows"], row["keys"], row["warps"]) == (known["rows"], known["keys"], known["warps"])
    assert compiled.shared <= compiled.shared_limit
    if size <= 128:
        assert compiled.spills == 0
    if architecture.startswith("sm_"):
        assert row["instructions"]["mma"] > 0 or kernel in ("summary", "join")


@pytest.mark.parametrize("kernel,architecture", QUICK)
def test_quick_set_compiles(kernel, architecture):
    check(kernel, "bf16", 64, architecture)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_compiles(kernel, architecture):
    for dtype, size in (("bf16", 64), ("bf16", 128), ("fp16", 128), ("fp32", 64)):
        if (kernel, architecture) not in QUICK or (dtype, size) != ("bf16", 64):
            compiled = compile_kernel(kernel, dtype, size, architecture)
            assert compiled.shared <= compiled.shared_limit
            assert compiled.spills == 0


@pytest.mark.slow
def test_options_compile():
    """Every optional tensor given, with dropout; and nothing given, no surrogate."""
    everything = frozenset({"threshold", "exclude_self", "padding", "first_real", "first_key", "seed"})
    for kernel in KERNELS:
        for present, surrogate, dropout in ((everything, True, True), (frozenset(), False, False)):
            compile_kernel(kernel, "bf16", 64, "sm_80", present, surrogate, dropout)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_option_at_once_spills_little(architecture):
    """What docs/gpu.md says of every option with dropout: nothing on sm_90 and sm_100, 132 bytes at most on sm_80."""
    rows = [r for r in ROWS if r["architecture"] == architecture and r["options"] != "tra_plus"]
    assert {(r["kernel"], r["head_size"]) for r in rows} >= {(k, size) for k in WALKS for size in (64, 128)}
    most = {"sm_80": 132, "gfx942": 8}.get(architecture, 0)
    assert max(r["spills"] for r in rows) <= most


def test_the_prediction_counts_what_was_compiled():
    for architecture, by_kernel in PER_SCORE.items():
        for kernel, by_size in by_kernel.items():
            found = {size: expected(kernel, "bf16", size, architecture)["per_score"] for size in (64, 128, 256)}
            assert by_size == found, (architecture, kernel)


WALK = """
.visible .entry kernel()
{
        mov.b32 %r1, 0;
        @%p1 bra        $L__BB0_9;
        bra.uni         $L__BB0_2;
$L__BB0_2:                              // the walk
        mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1};
        @!%p2 bra       $L__BB0_4;
        mov.b32 %r2, 0;
$L__BB0_3:                              // a recheck, round by round
        fma.rn.f64 %fd1, %fd2, %fd3, %fd4;
        @%p3 bra        $L__BB0_3;
$L__BB0_4:
        ex2.approx.ftz.f32 %f2, %f3;
        ex2.approx.ftz.f32 %f4, %f5;
        @%p4 bra        $L__BB0_6;
        ex2.approx.ftz.f32 %f6, %f7;
        mov.b32 %r3, 0;
$L__BB0_6:
        bar.sync        0;
        @%p5 bra        $L__BB0_2;
$L__BB0_9:
        ret;
}
"""


def test_a_tile_is_the_shortest_way_around_the_walk():
    everything, tile = count_instructions(WALK), tile_instructions(WALK)
    assert everything["all"] == 16 and everything["fp64"] == 1 and everything["exp2"] == 3
    assert tile["all"] == 7  # two branches, mma, two ex2, a barrier, the branch back
    assert (tile["mma"], tile["exp2"], tile["barriers"], tile["fp64"]) == (1, 2, 1, 0)


def test_instructions_are_counted():
    ptx = """
        mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1};
        @%p1 ex2.approx.ftz.f32 %f2, %f3;
        ld.global.v4.b32 {%r1}, [%rd1];
        ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1};
        bar.sync 0;
        // ex2.approx in a comment
    """
    found = count_instructions(ptx)
    assert found["mma"] == found["exp2"] == found["global loads"] == found["shared loads"] == found["barriers"] == 1
