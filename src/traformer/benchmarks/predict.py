"""`tra bench predict`: what the GPU kernel should take on an A100 and an H100, before anybody has measured it.

A model meant to be refuted. Time of a pass is the largest of what the tensor cores, the exponentials, the issue of
instructions and the memory need, each divided by the share of its peak that such a kernel reaches, and of the latency
of its tiles. That share (EFFICIENCY) and the latency (LATENCY) are guesses, everything else is counted: instructions of
a tile and registers in the compiled code, and tiles from the keys that blocks of M queries read, on drawn problems or
on what a trained model's layers are given (--run).
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from traformer.commands.arguments import positive_int
from traformer.errors import InputError, unknown_name
from traformer.types import JsonObject

if TYPE_CHECKING:
    from torch import Tensor

LENGTHS = (512, 2048, 8192, 32768, 131072)
DECAYS = ("init", "long", "never")
EFFICIENCY = 0.4  # of the peaks below; flash attention's is its own, as published
# Instructions of a thread per score, by architecture and head size up to and including it: the tiles of the compiled
# kernels in bf16, as results/gpu/compiled.json has them (tests compare).
PER_SCORE = {
    "sm_80": {
        "forward": {64: 51.4, 128: 72.8, 256: 239.2},
        "query_gradient": {64: 57.9, 128: 70.1, 256: 109.2},
        "key_gradient": {64: 117.2, 128: 240.5, 256: 578.0},
    },
    "sm_90": {
        "forward": {64: 51.9, 128: 76.0, 256: 148.2},
        "query_gradient": {64: 57.3, 128: 74.0, 256: 123.8},
        "key_gradient": {64: 117.5, 128: 245.0, 256: 588.0},
    },
}
ISSUED = 128  # of these a multiprocessor issues per cycle: four warps' instructions
SAMPLE = 8192  # rows drawn, from which the keys read per row are taken for longer sequences too
LATENCY = 1500  # cycles of one tile if nothing else runs: two loads that must arrive, some twelve barriers; a guess too
REGISTERS = 65536  # of a multiprocessor; the kernels use about 255 per thread, which leaves 2 programs of 4 warps


@dataclass(frozen=True)
class Device:
    """Peaks as the vendor publishes them (dense, 16-bit), and flash attention's speed as its authors do."""

    name: str
    architecture: str
    tensor: float  # operations per second on tensor cores
    exponentials: float  # per second
    bandwidth: float  # bytes per second
    clock: float
    multiprocessors: int
    flash: dict[str, float]  # operations per second that flash attention reaches, head size 64, causal, 16-bit


DEVICES = {
    "a100": Device(
        "A100 80GB", "sm_80", 312e12, 16 * 108 * 1.41e9, 2.0e12, 1.41e9, 108, {"forward": 170e12, "backward": 140e12}
    ),
    "h100": Device(
        "H100 SXM", "sm_90", 989e12, 16 * 132 * 1.83e9, 3.35e12, 1.83e9, 132, {"forward": 350e12, "backward": 280e12}
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `tra bench predict`."""
    parser.add_argument("--lengths", nargs="+", type=positive_int, default=list(LENGTHS), metavar="N")
    parser.add_argument(
        "--decays",
        nargs="+",
        default=list(DECAYS),
        metavar="NAME",
        help="init: logsigmoid(N(0,1)); long: logsigmoid(N(6,1)); never: 0, every key is read",
    )
    parser.add_argument(
        "--run",
        type=Path,
        metavar="DIR",
        help="a run folder: the keys that its model's layers read on its own task, too",
    )
    parser.add_argument("--devices", nargs="+", default=list(DEVICES), metavar="NAME", help="a100, h100")
    parser.add_argument("--heads", type=positive_int, default=16, help="batch times heads (default 16)")
    parser.add_argument("--head-size", type=positive_int, default=64)
    parser.add_argument(
        "--measured",
        type=Path,
        metavar="FILE",
        help="rows of `tra bench attention --device cuda --json FILE`: their times beside the predicted ones",
    )


def main(args: argparse.Namespace) -> int:
    """Print the table."""
    for kind, names, known in (("decay", args.decays, DECAYS), ("device", args.devices, DEVICES)):
        for name in names:
            if name not in known:
                raise unknown_name(kind, name, known)
    if args.head_size > 256:
        raise InputError(f"--head-size {args.head_size}: the kernel takes head sizes up to 256")
    measured = read_measured(args.measured)
    decays = [*args.decays, *(["run"] if args.run else [])]
    print("Predicted, not measured: see docs/gpu.md for the model. bf16, milliseconds.")
    columns = ("device", "length", "decay", "pass", "keys read per row", "tra ms", "bound by", "flash ms",
               "flash over tra", "measured tra ms")  # fmt: skip
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for device in args.devices:
        for length in args.lengths:
            for decay in decays:
                for passes in ("forward", "both"):
                    row = predict(DEVICES[device], length, decay, passes, args.heads, args.head_size, args.run)
                    seen = measured.get((length, decay, passes), "")
                    print(
                        f"| {DEVICES[device].name} | {length} | {decay} | {passes} | {row['read']:.0f} "
                        f"| {row['ms']:.3f} | {row['bound']} | {row['flash_ms']:.3f} "
                        f"| {row['flash_ms'] / row['ms']:.2f} | {seen} |"
                    )
    return 0


def read_measured(file: Path | None) -> dict[tuple[int, str, str], str]:
    if file is None:
        return {}
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
        found = [row for row in rows if row.get("method") == "tra"]
        return {(row["length"], row["decay"], row["pass"]): f"{row['ms']:.3f}" for row in found}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"--measured {file} has no rows of `tra bench attention --json`: {error}") from error


@functools.cache
def keys_read(
    length: int, decay: str, head_size: int, rows: int, keys: int, needs_grad: bool, run: Path | None = None
) -> float:
    """Mean keys that blocks of `rows` queries read, in whole blocks of `keys`: a block ends with its last row."""
    from traformer.benchmarks.attention import draw
    from traformer.ops import attention_stats

    if decay == "never":
        return (length + rows + keys) / 2
    if decay == "run":
        assert run is not None
        return statistics.fmean(read_in_blocks(read, rows, keys)[0].mean().item() for read in reads_of(run, length))
    sample = min(length, SAMPLE) // rows * rows or length
    q, k, _, log_decay = draw(1, 2, sample, head_size, decay)
    read = attention_stats(q, k, log_decay, score_bound=head_size**0.5 * 1.001, needs_grad=needs_grad).read
    taken, reach = read_in_blocks(read, rows, keys)
    if length <= sample:
        return taken.mean().item()
    # Of the second half: blocks that end by themselves, and those that reach the left end and would read on.
    taken, reach = (x[:, :, x.shape[2] // 2 :] for x in (taken, reach))
    share = (reach == 0).float().mean().item()
    ended = taken[reach > 0]
    return (1 - share) * (ended.mean().item() if ended.numel() else 0.0) + share * (length + rows) / 2


def read_in_blocks(read: Tensor, rows: int, keys: int) -> tuple[Tensor, Tensor]:
    """Keys that each block of queries takes, and the first of them: [B, H, blocks] from [B, H, T] per query."""
    import torch

    length = read.shape[2] // rows * rows or read.shape[2]
    rows = min(rows, length)
    end = torch.arange(1, length + 1)
    reach = (end - read[:, :, :length]).unflatten(-1, (-1, rows)).amin(-1) // keys * keys
    return (end[rows - 1 :: rows] - reach).float(), reach


@functools.cache
def reads_of(run: Path, length: int) -> list[Tensor]:
    """Keys that the queries of every layer with TRA read, [B, H, T] each, on the run's own task at this length."""
    import torch

    from traformer.benchmarks.attention import model_and_text
    from traformer.models.observe import observe

    model, ids = model_and_text(run, length, 1)
    found: list[Tensor] = []
    with torch.no_grad(), observe(model, visit=lambda seen: found.extend(s.read for s in [seen.reads()] if s)):
        model(input_ids=ids)
    if not found:
        raise InputError(f"{run} holds a model without threshold relative attention; give a run of attention 'tra'")
    return found


# Matrix products of M N D per tile (q.k, P.v; q.k, dO.v, dS.k; q.k, dO.v, P.dO, dS.q), and tensors read and written.
STAGES = {"forward": (2, 4), "query_gradient": (3, 6), "key_gradient": (4, 6)}


def predict(
    device: Device, length: int, decay: str, passes: str, heads: int, head_size: int, run: Path | None = None
) -> JsonObject:
    """Milliseconds of this kernel and of flash attention, and what bounds the former."""
    import torch

    from traformer.ops.threshold_relative.triton.configurations import configuration

    shape = configuration("forward", torch.bfloat16, head_size)
    read = keys_read(length, decay, head_size, shape.rows, shape.keys, passes == "both", run)
    scores = heads * length * read
    total, bounds, flash = 0.0, [], 0.0
    for stage, (products, tensors) in STAGES.items():
        if passes == "forward" and stage != "forward":
            continue
        chosen = configuration(stage, torch.bfloat16, head_size)
        per_score = PER_SCORE[device.architecture][stage]
        instructions = per_score[min(size for size in per_score if size >= head_size)]
        programs = device.multiprocessors * max(1, REGISTERS // (256 * 32 * chosen.warps))
        work = {
            # Counting kept keys takes one more product, with an N x N triangle.
            "tensor cores": scores * (2.0 * products * head_size + 2.0 * chosen.keys) / device.tensor,
            "instructions": scores * instructions / (ISSUED * device.multiprocessors * device.clock),
            "exponentials": scores / device.exponentials,
            "memory": heads * length * head_size * 2.0 * (tensors + 2) / device.bandwidth,
        }
        work = {name: seconds / EFFICIENCY for name, seconds in work.items()}
        work["latency"] = scores / (chosen.rows * chosen.keys) * LATENCY / programs / device.clock
        bound = max(work, key=lambda name: work[name])
        total += work[bound]
        bounds.append(bound)
        dense = heads * length * length / 2 * 2.0 * head_size * (2 if stage == "forward" else 2.5)
        flash += dense / device.flash["forward" if stage == "forward" else "backward"]
    return {"read": read, "ms": total * 1e3, "bound": ", ".join(dict.fromkeys(bounds)), "flash_ms": flash * 1e3}
