"""`tra bench predict`: what the GPU kernel should take on an A100 and an H100, before anybody has measured it.

A model meant to be refuted. Time of a pass is the largest of what the tensor cores, the exponentials, the other
arithmetic and the memory need, each divided by the share of its peak that such a kernel reaches, and of the latency of
its tiles. That share (EFFICIENCY) and the latency (LATENCY) are guesses, everything else is counted: work per tile of M
queries and N keys, registers in the compiled code, and tiles from the keys that blocks of M queries read on drawn
problems.
"""

from __future__ import annotations

import argparse
import functools
import json
from dataclasses import dataclass
from pathlib import Path

from traformer.commands.arguments import positive_int
from traformer.errors import InputError, unknown_name
from traformer.types import JsonObject

LENGTHS = (512, 2048, 8192, 32768, 131072)
DECAYS = ("init", "long", "never")
EFFICIENCY = 0.4  # of the peaks below; flash attention's is its own, as published
# Operations per score outside of the matrix products, counted in the kernels' source: masks, the choice, logits, sums.
OPERATIONS = {"forward": 18, "backward": 60}
SAMPLE = 8192  # rows drawn, from which the keys read per row are taken for longer sequences too
LATENCY = 1500  # cycles of one tile if nothing else runs: two loads that must arrive, some twelve barriers; a guess too
REGISTERS = 65536  # of a multiprocessor; the kernels use about 255 per thread, which leaves 2 programs of 4 warps


@dataclass(frozen=True)
class Device:
    """Peaks as the vendor publishes them (dense, 16-bit), and flash attention's speed as its authors do."""

    name: str
    tensor: float  # operations per second on tensor cores
    plain: float  # fp32 operations per second
    exponentials: float  # per second
    bandwidth: float  # bytes per second
    clock: float
    multiprocessors: int
    flash: dict[str, float]  # operations per second that flash attention reaches, head size 64, causal, 16-bit


DEVICES = {
    "a100": Device(
        "A100 80GB", 312e12, 19.5e12, 16 * 108 * 1.41e9, 2.0e12, 1.41e9, 108, {"forward": 170e12, "backward": 140e12}
    ),
    "h100": Device(
        "H100 SXM", 989e12, 67e12, 16 * 132 * 1.83e9, 3.35e12, 1.83e9, 132, {"forward": 350e12, "backward": 280e12}
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
    print("Predicted, not measured: see docs/gpu.md for the model. bf16, milliseconds.")
    columns = ("device", "length", "decay", "pass", "keys read per row", "tra ms", "bound by", "flash ms",
               "flash over tra", "measured tra ms")  # fmt: skip
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for device in args.devices:
        for length in args.lengths:
            for decay in args.decays:
                for passes in ("forward", "both"):
                    row = predict(DEVICES[device], length, decay, passes, args.heads, args.head_size)
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
def keys_read(length: int, decay: str, head_size: int, rows: int, keys: int, needs_grad: bool) -> float:
    """Mean keys that blocks of `rows` queries read, in whole blocks of `keys`: a block ends with its last row."""
    import torch

    from traformer.benchmarks.attention import draw
    from traformer.ops import attention_stats

    if decay == "never":
        return (length + rows + keys) / 2
    sample = min(length, SAMPLE) // rows * rows or length
    q, k, _, log_decay = draw(1, 2, sample, head_size, decay)
    read = attention_stats(q, k, log_decay, score_bound=head_size**0.5 * 1.001, needs_grad=needs_grad).read
    end = torch.arange(1, sample + 1)
    rows = min(rows, sample)
    reach = (end - read).unflatten(-1, (-1, rows)).amin(-1, keepdim=True) // keys * keys  # [1, 2, blocks, 1]
    block_end = end.unflatten(-1, (-1, rows))[:, -1:]  # [blocks, 1]
    taken = (block_end - reach).squeeze(-1).float()  # [1, 2, blocks]
    if length <= sample:
        return taken.mean().item()
    # Of the second half: blocks that end by themselves, and those that reach the left end and would read on.
    taken, reach = taken[:, :, taken.shape[2] // 2 :], reach[:, :, reach.shape[2] // 2 :, 0]
    share = (reach == 0).float().mean().item()
    ended = taken[reach > 0]
    return (1 - share) * (ended.mean().item() if ended.numel() else 0.0) + share * (length + rows) / 2


def predict(device: Device, length: int, decay: str, passes: str, heads: int, head_size: int) -> JsonObject:
    """Milliseconds of this kernel and of flash attention, and what bounds the former."""
    import torch

    from traformer.ops.threshold_relative.triton.configurations import configuration

    forward = configuration("forward", torch.bfloat16, head_size)
    read = keys_read(length, decay, head_size, forward.rows, forward.keys, passes == "both")
    scores = heads * length * read
    stages = [("forward", 2, 1, 4)]
    if passes == "both":
        # Products of M N D per tile: q.k, dO.v and dS.k for queries; q.k, dO.v, P.dO and dS.q for keys.
        stages.append(("backward", 7, 2, 10))
    total, bounds, flash = 0.0, [], 0.0
    for stage, products, exponentials, tensors in stages:
        chosen = forward if stage == "forward" else configuration("query_gradient", torch.bfloat16, head_size)
        triangles = exponentials * 2.0 * chosen.keys  # counting kept keys: a product with an N x N triangle per tile
        programs = device.multiprocessors * max(1, REGISTERS // (256 * 32 * chosen.warps))
        tiles = scores / (chosen.rows * chosen.keys) * exponentials  # the backward visits each twice
        work = {
            "tensor cores": scores * (2.0 * products * head_size + triangles) / device.tensor,
            "arithmetic": scores * OPERATIONS[stage] / device.plain,
            "exponentials": scores * exponentials / device.exponentials,
            "memory": heads * length * head_size * 2.0 * (tensors + 2) / device.bandwidth,
        }
        work = {name: seconds / EFFICIENCY for name, seconds in work.items()}
        work["latency"] = tiles * LATENCY / programs / device.clock
        bound = max(work, key=lambda name: work[name])
        total += work[bound]
        bounds.append(bound)
        dense = heads * length * length / 2 * 2.0 * head_size * (2 if stage == "forward" else 5)
        flash += dense / device.flash[stage]
    return {"read": read, "ms": total * 1e3, "bound": ", ".join(dict.fromkeys(bounds)), "flash_ms": flash * 1e3}
