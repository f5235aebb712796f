"""Ahead-of-time compilation of every kernel, without a GPU: for tests, for the table in results/gpu and the cost model.

    python -m traformer.ops.threshold_relative.triton.compilation --out results/gpu/compiled.json

compiles for each architecture and prints shared memory, registers and spilled registers. NVIDIA's come from the bundled
assembler, AMD's from the metadata of the generated code.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import tempfile
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import torch

from traformer.ops.threshold_relative.triton.configurations import COUNT_BY_TRIANGLE, block_d, configuration
from traformer.ops.threshold_relative.triton.ptx import count_instructions, tile_instructions
from traformer.types import JsonObject

# Name: how triton calls it, and the most shared memory one program may have (bytes).
ARCHITECTURES: dict[str, tuple[str, int | str, int, int]] = {
    "sm_80": ("cuda", 80, 32, 163 * 1024),
    "sm_90": ("cuda", 90, 32, 227 * 1024),
    "sm_100": ("cuda", 100, 32, 227 * 1024),
    "gfx942": ("hip", "gfx942", 64, 64 * 1024),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_POINTERS = {
    "log_decay": "*fp32", "threshold": "*fp32", "exclude_self": "*i1", "padding": "*i1", "first_real": "*i32",
    "first_key": "*i32", "score_bound": "*fp32", "seed": "*i64", "norm": "*fp32", "norm_so_far": "*fp32",
    "value": "*fp32", "value_so_far": "*fp32", "norms": "*fp32", "values": "*fp32", "normaliser": "*fp32",
    "reach": "*i32", "kept": "*i32", "log_sums": "*fp32", "deltas": "*fp32", "counts": "*fp32", "block_reach": "*i32",
    "last_block": "*i32", "largest_norm": "*fp32", "index_low": "*fp32", "index_high": "*fp32", "index_norm": "*fp32",
    "part_sums": "*fp32", "part_rows": "*fp32", "part_low": "*i32", "settled": "*i32", "grad_decay": "*fp32",
    "grad_threshold": "*fp32",
}  # fmt: skip
_ELEMENTS = ("q", "k", "v", "out", "grad_out", "grad_q", "grad_k", "grad_v")
_FLOATS = (
    "threshold_value", "threshold_rest", "scale", "scale_rest", "log_tolerance", "steepest", "steepness",
    "survivor_scale",
)  # fmt: skip
OPTIONAL = ("threshold", "exclude_self", "padding", "first_real", "first_key", "seed", "grad_threshold")
# What a training step of tra_plus uses: own keys excluded by head, a surrogate, thresholds of 0. And all there is.
PLAIN = frozenset({"exclude_self"})
EVERYTHING = frozenset({"threshold", "exclude_self", "padding", "first_real", "first_key", "seed"})
OPTIONS = {"tra_plus": (PLAIN, False), "every option and dropout": (EVERYTHING, True)}


@dataclass(frozen=True)
class Compiled:
    """One kernel for one architecture."""

    kernel: str
    dtype: str
    head_size: int
    architecture: str
    rows: int
    keys: int
    warps: int
    shared: int  # bytes per program
    shared_limit: int
    registers: int  # per thread
    spills: int  # bytes per thread (NVIDIA), registers (AMD)
    code: str  # PTX, or AMD assembly
    options: str = "tra_plus"


def kernels() -> JsonObject:
    """Every kernel by the name of its configuration."""
    from traformer.ops.threshold_relative.triton import backward_kernels, decode_kernels, forward_kernel, summaries

    return {
        "summary": summaries.summary_kernel,
        "forward": forward_kernel.forward_kernel,
        "query_gradient": backward_kernels.query_gradient_kernel,
        "key_gradient": backward_kernels.key_gradient_kernel,
        "decode": decode_kernels.decode_kernel,
        "join": decode_kernels.join_kernel,
    }


def compile_kernel(
    name: str,
    dtype: str,
    head_size: int,
    architecture: str,
    present: frozenset[str] = PLAIN,
    surrogate: bool = True,
    dropout: bool = False,
    by_triangle: bool = COUNT_BY_TRIANGLE,
    shape: tuple[int, int, int] | None = None,
) -> Compiled:
    """present: which optional tensors are given. shape: rows, keys, warps in place of the table's."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    backend, arch, warp_size, shared_limit = ARCHITECTURES[architecture]
    element = DTYPES[dtype]
    kernel = kernels()[name]
    if shape is None:
        chosen = configuration({"summary": "forward", "join": "decode"}.get(name, name), element, head_size)
        shape = (chosen.rows, chosen.keys, 4 if name in ("summary", "join") else chosen.warps)
    rows, keys, warps = shape
    constants: JsonObject = {
        "HEAD_SIZE": head_size, "BLOCK_D": block_d(head_size), "BLOCK_M": rows, "BLOCK_N": keys,
        "CHUNK": 1 if dtype == "fp32" else 8, "ALIGN": 16 if head_size % 16 == 0 else 8, "NEEDS_GRAD": True,
        "NEAR": False, "INDEX_BLOCK": 64,
        "SURROGATE": surrogate, "DROPOUT": dropout, "BY_TRIANGLE": by_triangle,
    }  # fmt: skip
    missing = {n for n in OPTIONAL if n not in present}
    if surrogate:
        missing.discard("grad_threshold")
    if dropout:
        missing.discard("seed")
    signature, values, attributes = {}, {}, {}
    for position, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument], values[argument] = "constexpr", constants[argument]
        elif argument in missing:
            signature[argument], values[argument] = "constexpr", None
        elif argument in _ELEMENTS or argument in _POINTERS:
            signature[argument] = _POINTERS.get(argument, f"*{dtype}")
            attributes[(position,)] = [["tt.divisibility", 16]]  # torch's allocations are aligned
        else:
            signature[argument] = "fp32" if argument in _FLOATS else "i32"
    compiled = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=attributes),
        target=GPUTarget(backend, arch, warp_size),
        options={"num_warps": warps, "enable_fp_fusion": True},
    )
    code = compiled.asm["ptx" if backend == "cuda" else "amdgcn"]
    registers, spills = _nvidia_registers(code, architecture) if backend == "cuda" else _amd_registers(code)
    return Compiled(
        name, dtype, head_size, architecture, rows, keys, warps, compiled.metadata.shared, shared_limit, registers,
        spills, code,
    )  # fmt: skip


def _nvidia_registers(ptx: str, architecture: str) -> tuple[int, int]:
    from triton.backends.nvidia.compiler import get_ptxas

    target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    assert target is not None
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "kernel.ptx"
        source.write_text(ptx, encoding="utf-8")
        assembler = get_ptxas(int(architecture.removeprefix("sm_"))).path
        command = [assembler, "-v", f"--gpu-name={target.group(1)}", source, "-o", Path(scratch) / "kernel.cubin"]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    registers = re.search(r"Used (\d+) registers", report)
    stores, loads = (re.search(rf"(\d+) bytes spill {kind}", report) for kind in ("stores", "loads"))
    assert registers is not None and stores is not None and loads is not None
    return int(registers.group(1)), int(stores.group(1)) + int(loads.group(1))


def _amd_registers(assembly: str) -> tuple[int, int]:
    found = {key: int(value) for key, value in re.findall(r"\.(\w+):\s+(\d+)", assembly)}
    return found["vgpr_count"], found["vgpr_spill_count"]


MODULE = "traformer.ops.threshold_relative.triton.compilation"
KERNELS = ("summary", "forward", "query_gradient", "key_gradient", "decode", "join")
WALKS = ("forward", "query_gradient", "key_gradient")  # those that go from tile to tile with a weight per score
HEAD_SIZES = (64, 128, 256)
IDENTITY = ("kernel", "dtype", "head_size", "architecture", "options")
COLUMNS = (*IDENTITY, "rows", "keys", "warps", "shared", "registers", "spills", "per_score")


def record(compiled: Compiled) -> JsonObject:
    """A row of the table."""
    row = {name: getattr(compiled, name) for name in COLUMNS if name != "per_score"}
    if compiled.architecture.startswith("sm_"):
        row["instructions"] = count_instructions(compiled.code)
        if compiled.kernel in WALKS:
            row["tile"] = tile = tile_instructions(compiled.code)
            row["per_score"] = round(tile["all"] * 32 * compiled.warps / (compiled.rows * compiled.keys), 1)
    return row


def markdown(rows: list[JsonObject]) -> str:
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(str(row.get(name, "")) for name in COLUMNS) + " |" for row in rows]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Compile the kernels without a GPU: shared memory, registers, spills.")
    parser.add_argument("--architectures", nargs="+", default=list(ARCHITECTURES), choices=list(ARCHITECTURES))
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS), choices=KERNELS)
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--head-sizes", nargs="+", type=int, default=list(HEAD_SIZES))
    parser.add_argument("--options", nargs="+", default=["tra_plus"], choices=list(OPTIONS), help="of the call")
    parser.add_argument("--out", type=Path, help="FILE.json: add the rows to it, and write FILE.md beside it")
    args = parser.parse_args(arguments)
    rows = json.loads(args.out.read_text(encoding="utf-8"))["rows"] if args.out and args.out.exists() else []
    for options, architecture, dtype, size, kernel in itertools.product(
        args.options, args.architectures, args.dtypes, args.head_sizes, args.kernels
    ):
        present, dropout = OPTIONS[options]
        row = record(
            replace(compile_kernel(kernel, dtype, size, architecture, present, dropout=dropout), options=options)
        )
        print(" ".join(f"{name} {row.get(name)}" for name in COLUMNS), flush=True)
        same = [old for old in rows if all(old[name] == row[name] for name in IDENTITY)]
        rows = [old for old in rows if old not in same] + [row]
        if args.out:
            order = {name: at for at, name in enumerate((*OPTIONS, *ARCHITECTURES, *DTYPES, *KERNELS))}
            named = ("options", "architecture", "dtype", "head_size", "kernel")
            rows.sort(key=lambda row: [order.get(row[name], row[name]) for name in named])
            about = {"triton": version("triton"), "command": f"python -m {MODULE} --out {args.out}"}
            lines = ",\n".join(json.dumps(row) for row in rows)
            args.out.write_text(f'{{"about": {json.dumps(about)}, "rows": [\n{lines}\n]}}\n', encoding="utf-8")
            args.out.with_suffix(".md").write_text(markdown(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
