"""What a training step costs: time and peak memory of each attention over RoPE's, in the same trunk.

Steps of all methods are interleaved in one process, in an order that turns from round to round, so that a busy machine
slows all methods equally; the result is the ratio within a round: its median and its middle half. Memory is
measured in a separate process for each method.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from traformer.benchmarks.attention import benchmark_device
from traformer.commands.arguments import finite_number, positive_int
from traformer.errors import InputError, unknown_name
from traformer.methods import resolve_method
from traformer.storage import check_file, write_atomically
from traformer.types import JsonObject

BASELINE = "rope"
DEFAULT_METHODS = ("tra", "rope", "fot", "alibi", "cope")
# TRA over RoPE in the paper, minutes of 20,000 steps at window 256 and batch 64 on an A40.
PAPER = {"tiny": 65.88 / 58.73, "medium": 178.19 / 156.34}
PAPER_WINDOW = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `tra bench train`."""
    parser.add_argument("--sizes", nargs="+", default=["tiny", "mini"], metavar="PRESET", help="(default: tiny mini)")
    parser.add_argument("--windows", nargs="+", type=positive_int, default=[256, 1024, 4096], metavar="N")
    parser.add_argument(
        "--attentions",
        nargs="+",
        default=list(DEFAULT_METHODS),
        metavar="NAME",
        help=f"tra:blockwise is TRA on another backend (default: {' '.join(DEFAULT_METHODS)})",
    )
    parser.add_argument("--tokens", type=positive_int, default=8192, help="tokens a step (default 8192)")
    parser.add_argument("--vocabulary", type=positive_int, default=257, help="entries (default 257; GPT-2 has 50257)")
    parser.add_argument("--rounds", type=positive_int, default=7, help="timed steps a method (default 7)")
    parser.add_argument("--device", default="cpu", metavar="NAME", help="cpu, or cuda (default cpu)")
    parser.add_argument("--threads", type=positive_int, help="threads of torch (default: its own choice)")
    parser.add_argument(
        "--gate-bias",
        type=finite_number,
        default=0.0,
        help="added to TRA's gates: 6 makes every head remember far, where no row can stop early (default 0)",
    )
    parser.add_argument("--no-memory", action="store_true", help="leave out the processes that measure memory")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")


def main(args: argparse.Namespace) -> int:
    """Measure, print a table for each size, and write the rows where asked."""
    for name in args.attentions:
        attention, backend = split_name(name)
        if "backend" not in resolve_method(attention).option_table and backend:
            raise InputError(
                f"--attentions has {name}, but {attention} has no backends to choose from; give {attention}"
            )
    import torch

    from traformer.devices import set_threads
    from traformer.models import PRESETS
    from traformer.ops import available_backends

    for name in args.attentions:
        backend = split_name(name)[1]
        if backend and backend not in available_backends():
            raise unknown_name("backend", backend, available_backends())
    for name in args.sizes:
        if name not in PRESETS:
            raise unknown_name("preset", name, PRESETS)
    for window in args.windows:
        if window > args.tokens:
            raise InputError(f"--windows has {window}, more than --tokens {args.tokens} of a step; give more tokens")
    if args.json is not None:
        check_file(args.json)
    set_threads(args.threads)
    device = benchmark_device(args.device)
    if device.type != "cpu" and not args.no_memory:
        raise InputError("--device cuda: memory is measured in processes on the CPU; add --no-memory")
    methods = list(dict.fromkeys([*args.attentions, BASELINE]))
    rows: list[JsonObject] = []
    for size in args.sizes:  # a size at a time, shown and written, so that stopping loses little
        found: list[JsonObject] = []
        for window in args.windows:
            print(f"measuring {size}, window {window}", file=sys.stderr, flush=True)
            settings = {
                "size": size,
                "window": window,
                "tokens": args.tokens,
                "vocabulary": args.vocabulary,
                "gate_bias": args.gate_bias,
                "device": args.device,
            }
            found += measure(methods, args.rounds, **settings)
        if not args.no_memory:
            print(f"measuring {size}, memory", file=sys.stderr, flush=True)
            names = ("attention", "size", "window", "tokens", "vocabulary", "gate_bias")
            peaks = peak_memory([{name: row[name] for name in names} for row in found], torch.get_num_threads())
            for row, peak in zip(found, peaks, strict=True):
                row["peak_bytes"] = peak
        show(found, args.gate_bias)
        rows += found
        if args.json is not None:
            write_rows(rows, args.json)
    print("paper: minutes of 20,000 steps on an A40 at window 256, TRA over RoPE")
    return 0


def write_rows(rows: Sequence[JsonObject], file: Path) -> None:
    import torch

    from traformer.runs.folder import versions

    about = {**versions(), "threads": torch.get_num_threads(), "cpu": torch.backends.cpu.get_cpu_capability()}
    write_atomically(file, json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


def split_name(name: str) -> tuple[str, str | None]:
    """Attention and backend of `tra:blockwise`; the backend is None where it is not named."""
    attention, _, backend = name.partition(":")
    return attention, backend or None


class Step:
    """A model and its optimizer; called, it does one training step on the same tokens."""

    def __init__(
        self,
        attention: str,
        size: str,
        window: int,
        tokens: int,
        vocabulary: int,
        gate_bias: float = 0.0,
        device: str = "cpu",
    ) -> None:
        import torch

        from traformer.models import TraformerConfig, TraformerForCausalLM
        from traformer.training.loss import AnswerLoss

        torch.manual_seed(0)
        attention, backend = split_name(attention)
        config = TraformerConfig.preset(
            size, attention=attention, vocab_size=vocabulary, pad_token_id=None, attention_dropout=0.0,
            attention_options={"backend": backend} if backend else {},
        )  # fmt: skip
        self.model = TraformerForCausalLM(config).train().to(device)
        for name, parameter in self.model.named_parameters():
            if name.endswith("decay_proj.bias"):
                parameter.data += gate_bias
        self.parameters = list(self.model.parameters())
        self.loss = AnswerLoss(self.model)
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-4, weight_decay=0.01, fused=True)
        self.input_ids = torch.randint(0, vocabulary, (max(1, tokens // window), window)).to(device)
        self.answers = torch.ones_like(self.input_ids, dtype=torch.bool)
        self.answers[:, 0] = False

    def __call__(self) -> None:
        import torch
        from torch import nn

        loss, _ = self.loss(self.input_ids, self.answers)
        (loss / self.input_ids.numel()).backward()
        float(nn.utils.get_total_norm([parameter.grad for parameter in self.parameters if parameter.grad is not None]))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.input_ids.is_cuda:
            torch.cuda.synchronize()


def measure(methods: Sequence[str], rounds: int, **settings: Any) -> list[JsonObject]:
    """Seconds per step and their ratio to RoPE's, one row per method."""
    from traformer.devices import flush_denormals

    steps = {name: Step(name, **settings) for name in methods}
    kernels = {name: attention_kernel(step) for name, step in steps.items()}  # also warms up
    with flush_denormals():  # as training does
        for step in steps.values():
            step()
        seconds = interleaved(steps, rounds)
    rows = []
    for name in methods:
        ratios = sorted(mine / base for mine, base in zip(seconds[name], seconds[BASELINE], strict=True))
        quarter = len(ratios) // 4
        rows.append(
            {
                "benchmark": "train",
                **settings,
                "batch": int(steps[name].input_ids.shape[0]),
                "attention": name,
                "kernel": kernels[name],
                "parameters": sum(parameter.numel() for parameter in steps[name].parameters),
                "seconds": statistics.median(seconds[name]),
                "ratio": statistics.median(ratios),
                "ratio_low": ratios[quarter],
                "ratio_high": ratios[-1 - quarter],
                "rounds": rounds,
            }
        )
    return rows


def interleaved(steps: Mapping[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each, a round at a time; who goes first turns."""
    names = list(steps)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        turn = number % len(names)
        for name in [*names[turn:], *names[:turn]]:
            began = time.perf_counter()
            steps[name]()
            seconds[name].append(time.perf_counter() - began)
    return seconds


def attention_kernel(step: Step) -> str:
    """The attention operator that a step runs, and for SDPA which of its kernels."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: set[str] = set()

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.add(func.name())
            return func(*args, **(kwargs or {}))

    with Noting():
        step()
    if any(name.startswith("traformer::threshold_relative_attention") for name in seen):
        from traformer.ops.threshold_relative.backends import choose_backend

        weight = step.model.get_output_embeddings().weight
        asked = step.model.config.attention_options.get("backend", "auto")
        return f"TRA {choose_backend(asked, weight.device, weight.dtype, step.model.config.head_dim)}"
    for name in sorted(seen):
        if "scaled_dot_product" in name and "backward" not in name:
            kind = name.partition("scaled_dot_product_")[2].replace("_attention", "").replace("fused_", "")
            return f"SDPA {kind.replace('_', ' ')}"
    return "torch operations"


def peak_memory(settings: Sequence[JsonObject], threads: int) -> list[int | None]:
    """Bytes that two steps of each setting need beyond a process that has loaded everything; None where unknown."""
    import subprocess

    command = [
        sys.executable,
        "-m",
        "traformer.benchmarks.train",
        json.dumps({"threads": threads, "settings": settings}),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = done.stdout.split() if done.returncode == 0 else []
    return (
        [int(line) if line.isdigit() else None for line in lines]
        if len(lines) == len(settings)
        else [None] * len(settings)
    )


def _measure_memory(text: str) -> None:
    """In the process that `peak_memory` starts: a fork for each setting, which prints the growth of its peak."""
    import os
    import resource

    import torch

    import traformer.models
    import traformer.training.loss  # noqa: F401  loaded before the forks, so that none of them counts it

    wanted = json.loads(text)
    torch.set_num_threads(wanted["threads"])
    for settings in wanted["settings"]:
        if child := os.fork():
            if os.waitpid(child, 0)[1]:
                print("failed", flush=True)
            continue
        # The smallest step first, so that kernels and threads are loaded. No thread was started before the fork.
        Step(**{**settings, "size": "tiny", "window": 16, "tokens": 16, "vocabulary": 8})()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        step = Step(**settings)
        step()
        step()
        unit = 1 if sys.platform == "darwin" else 1024
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit, flush=True)
        os._exit(0)


def show(rows: Sequence[JsonObject], gate_bias: float) -> None:
    import torch

    from traformer.terminal import new_table, stdout_console

    console = stdout_console(140)
    for size in dict.fromkeys(row["size"] for row in rows):
        mine = [row for row in rows if row["size"] == size]
        title = (
            f"{size}: a training step of {mine[0]['tokens']:,} tokens, vocabulary {mine[0]['vocabulary']:,}, float32, "
            f"attention dropout 0, {torch.get_num_threads()} threads"
            + (f", gate bias {gate_bias:g}" if gate_bias else "")
        )
        table = new_table(title)
        for heading in ("window", "attention", "kernel", "ms per step", "over RoPE (middle half)", "paper", "peak MB"):
            table.add_column(heading, justify="left" if heading in ("attention", "kernel") else "right")
        for row in mine:
            paper = PAPER.get(size) if (row["attention"], row["window"]) == ("tra", PAPER_WINDOW) else None
            peak = row.get("peak_bytes")
            table.add_row(
                str(row["window"]),
                row["attention"],
                row["kernel"],
                f"{1000 * row['seconds']:.0f}",
                f"{row['ratio']:.2f} ({row['ratio_low']:.2f}–{row['ratio_high']:.2f})",
                f"{paper:.2f}" if paper else "",
                f"{peak / 1e6:,.0f}" if peak is not None else "",
            )
        console.print(table)


if __name__ == "__main__":
    _measure_memory(sys.argv[1])
