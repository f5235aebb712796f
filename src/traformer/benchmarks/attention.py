"""`tra bench attention`: the kernel against ordinary attention, by length.

Every round runs each method once, in turn, so that a busy machine slows all methods equally; the result is the ratio
within a round: its median and its middle half. Methods:

    tra        this kernel with its default tolerance        tra_full   the same with tolerance 0: every key is read
    sdpa       torch's scaled_dot_product_attention, causal  alibi      the same with an ALiBi bias and causal mask
    eager      the formula in plain torch                    compiled   torch.compile of it
    flex       FlexAttention with ALiBi's bias, on a GPU

A last table has the time of tra_full with decays as at the start over that with heads that never forget. Both read the
same keys, so it is about 1; where a processor is slow on denormal numbers and the kernel did not flush them, it is far
above.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from traformer.commands.arguments import positive_int, positive_number
from traformer.errors import InputError, unknown_name
from traformer.storage import check_file
from traformer.types import JsonObject

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

METHODS = ("tra", "tra_full", "sdpa", "alibi", "flex", "eager", "compiled")
DECAYS = ("init", "long", "run")
DENORMAL_SHAPE = (16, 4, 512)  # batch, heads and length at which init is compared with long
PASSES = ("forward", "both")
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
# Batch and heads by length: about as much work for the quadratic ones as a machine has patience for.
SHAPES = {128: (128, 4), 256: (64, 4), 512: (16, 4), 1024: (4, 8), 2048: (1, 8), 4096: (1, 8)}
SCORES_LIMIT = 2**27  # batch * heads * length^2 above which methods that write all scores are left out
COMPILE_LIMIT = 2**25


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `tra bench attention`."""
    parser.add_argument("--lengths", nargs="+", type=positive_int, default=list(LENGTHS), metavar="N")
    parser.add_argument("--methods", nargs="+", default=["tra", "tra_full", "sdpa"], metavar="NAME",
                        help=f"of {', '.join(METHODS)} (default: tra tra_full sdpa)")  # fmt: skip
    parser.add_argument("--decays", nargs="+", metavar="NAME",
                        help="init: logsigmoid(N(0,1)); long: logsigmoid(N(6,1)); run: those of --run "
                             "(default: init long, or run where --run is given)")  # fmt: skip
    parser.add_argument(
        "--passes", nargs="+", default=list(PASSES), metavar="NAME", help="forward, both (default: both of them)"
    )
    parser.add_argument(
        "--run", type=Path, metavar="DIR", help="a run folder: measure on its model's queries, keys and decays too"
    )
    parser.add_argument("--device", default="cpu", metavar="NAME", help="cpu, or cuda (default cpu)")
    parser.add_argument(
        "--dtype", default="float32", choices=["float32", "bfloat16", "float16"], help="(default float32)"
    )
    parser.add_argument("--head-size", type=positive_int, default=64)
    parser.add_argument("--rounds", type=positive_int, default=15, help="timed calls per method (default 15)")
    parser.add_argument(
        "--seconds",
        type=positive_number,
        default=20.0,
        help="per case, fewer rounds when they take longer (default 20)",
    )
    parser.add_argument("--quadratic-limit", type=positive_int, default=32768, metavar="N",
                        help="longest length at which methods that read all keys are run (default 32k)")  # fmt: skip
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall",
                        help="cpu: processor time, for --threads 1 on a busy machine (default: wall)")  # fmt: skip
    parser.add_argument("--threads", type=positive_int, help="threads of torch (default: its own choice)")
    parser.add_argument(
        "--memory", action="store_true", help="also measure peak memory, each case in a process of its own"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table to FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw time by length into FILE")


def main(args: argparse.Namespace) -> int:
    """Measure, print the table, write what was asked for."""
    import torch

    from traformer.devices import set_threads

    if args.decays is None:
        args.decays = ["init", "long"] if args.run is None else ["run"]
    if args.run is not None and "run" not in args.decays:
        args.decays.append("run")
    for kind, names, known in (
        ("method", args.methods, METHODS),
        ("decay", args.decays, DECAYS),
        ("pass", args.passes, PASSES),
    ):
        for name in names:
            if name not in known:
                raise unknown_name(kind, name, known)
    if "run" in args.decays and args.run is None:
        raise InputError("--decays run needs a trained model to take the decays from; add --run DIR")
    for path in (args.json, args.markdown, args.plot):
        if path is not None:
            check_file(path)
    set_threads(args.threads)
    device = benchmark_device(args.device)
    if device.type != "cpu" and args.memory:
        raise InputError("--memory measures processes on the CPU; leave it out with --device cuda")
    about = describe_machine(args.head_size) | describe_device(device) | {"clock": args.clock, "dtype": args.dtype}
    print(machine_line(about))
    rows: list[JsonObject] = []
    for length in args.lengths:
        batch, heads = SHAPES.get(length, (1, 2) if length <= 32768 else (1, 1))
        for decay in args.decays:
            inputs = draw(batch, heads, length, args.head_size, decay) if decay != "run" else from_run(args.run, length)
            inputs = tuple(x.to(device, getattr(torch, args.dtype)) for x in inputs)
            for passes in args.passes:
                print(f"measuring length {length}, {decay} decay, {passes}", file=sys.stderr, flush=True)
                rows += measure(
                    args.methods, inputs, decay, passes, args.rounds, args.seconds, args.quadratic_limit, args.clock
                )
            if args.memory and decay != "run":
                for row in rows[-len(args.methods) * len(args.passes) :]:
                    if row["length"] == length and row["decay"] == decay and row["method"] in ("tra", "sdpa"):
                        row["peak_mib"] = peak_memory(row, args.head_size, torch.get_num_threads())
    table = markdown(rows)
    if "tra_full" in args.methods and {"init", "long"} <= set(args.decays) and device.type == "cpu":
        compared = [compare_decays(name, args.head_size, args.rounds, args.clock) for name in args.passes]
        table += "\n\n" + denormal_table(compared)
        rows += compared
    print(table)
    if args.markdown is not None:
        args.markdown.write_text(f"{machine_line(about)}\n\n{table}\n", encoding="utf-8")
    if args.json is not None:
        args.json.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    if args.plot is not None:
        plot([row for row in rows if row["benchmark"] == "attention"], args.plot)
    return 0


def describe_machine(head_size: int) -> JsonObject:
    """What ran: processor, versions, threads, instruction sets, and which of torch's CPU kernels answers for SDPA."""
    import torch
    from torch.nn.attention import SDPBackend

    from traformer.ops.threshold_relative import cpu

    q = torch.empty(1, 1, 256, head_size)
    names = {kind.value: name for name, kind in SDPBackend.__members__.items()}
    chosen = names.get(int(torch._fused_sdp_choice(q, q, q, is_causal=True)), "unknown")
    return {
        "cpu": cpu_model(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "torch cpu": torch.backends.cpu.get_cpu_capability(),
        "kernel": cpu.instruction_set() if cpu.is_available() else f"none ({cpu.unavailable_reason()})",
        "denormals": "flushed in the kernel" if cpu.is_available() else "kept",
        "sdpa backend": chosen,
    }


def benchmark_device(name: str) -> torch.device:
    """The device of this name, where torch has it."""
    import torch

    if name not in ("cpu", "cuda"):
        raise unknown_name("device", name, ("cpu", "cuda"))
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch sees no GPU here; leave --device out, or run on a machine that has one")
    return torch.device(name)


def describe_device(device: torch.device) -> JsonObject:
    """Name, memory and compiler of a GPU; nothing for the CPU."""
    import torch

    if device.type == "cpu":
        return {}
    facts = torch.cuda.get_device_properties(device)
    return {
        "gpu": facts.name,
        "gpu memory": f"{facts.total_memory / 2**30:.0f} GiB",
        "multiprocessors": facts.multi_processor_count,
        "cuda": torch.version.cuda or f"ROCm {torch.version.hip}",
        "triton": importlib.metadata.version("triton"),
    }


def clock_of(clock: str, device: torch.device) -> Callable[[], float]:
    """Seconds; on a GPU once everything before has finished."""
    import torch

    if device.type == "cuda":

        def now() -> float:
            torch.cuda.synchronize(device)
            return time.perf_counter()

        return now
    return time.process_time if clock == "cpu" else time.perf_counter


def cpu_model() -> str:
    """The processor's name, as the kernel of the operating system has it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def machine_line(about: JsonObject) -> str:
    return "; ".join(f"{key} {value}" for key, value in about.items())


def draw(batch: int, heads: int, length: int, head_size: int, decay: str) -> tuple[Tensor, ...]:
    """q, k, v, log_decay with QK-norm, the heads side by side in memory as a model's projections leave them."""
    import torch
    import torch.nn.functional as F

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(batch, length, heads, head_size, generator=generator) for _ in range(3))
    q, k = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) for x in (q, k))
    log_decay = F.logsigmoid(torch.randn(batch, heads, length, generator=generator) + (6.0 if decay == "long" else 0.0))
    return (*(x.transpose(1, 2) for x in (q, k, v)), log_decay)


def from_run(folder: Path, length: int) -> tuple[Tensor, ...]:
    """What the last layer of a trained model passes to its attention, on its own task's test at this length."""
    import torch

    from traformer.models.observe import observe

    model, ids = model_and_text(folder, length, max(1, 8192 // length))
    with torch.no_grad(), observe(model) as trace:
        model(input_ids=ids)
        operands = next((found for seen in reversed(trace) if (found := seen.operands()) is not None), None)
    if operands is None:
        raise InputError(f"{folder} holds a model without threshold relative attention; give a run of attention 'tra'")
    return operands


def model_and_text(folder: Path, length: int, count: int) -> tuple[nn.Module, Tensor]:
    """A run's model, and [count, length] tokens of its own task's test."""
    from traformer.models.from_run import load_run

    model, task, _, _ = load_run(folder, device="cpu")
    if task.sequence_length < length:
        task = task.at_length(length, length)
    return model, task.examples(seed=task.test_seed(0), start=0, count=count).input_ids[:, :length]


def callables(inputs: tuple[Tensor, ...], passes: str, quadratic: bool) -> dict[str, Callable[[], object]]:
    """One closure per method, without those too large for this length."""
    import torch
    import torch.nn.functional as F

    from traformer.ops import threshold_relative_attention

    q, k, v, log_decay = (x.detach().requires_grad_(passes == "both") for x in inputs)
    upstream = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(q.device, q.dtype)
    length, heads = q.shape[2], q.shape[1]
    scores = q.shape[0] * heads * length * length

    def run(function: Callable[..., Tensor], *leaves: Tensor) -> Callable[[], object]:
        def forward() -> Tensor:
            with torch.no_grad():
                return function(*leaves)

        return forward if passes == "forward" else lambda: torch.autograd.grad(function(*leaves), leaves, upstream)

    methods = {"tra": run(threshold_relative_attention, q, k, v, log_decay)}
    if not quadratic:
        return methods
    methods["tra_full"] = run(lambda *x: threshold_relative_attention(*x, tolerance=0.0), q, k, v, log_decay)
    methods["sdpa"] = run(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), q, k, v)
    if scores <= SCORES_LIMIT:
        position = torch.arange(length, dtype=torch.float32, device=q.device)
        slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1, device=q.device) / heads)
        bias = (position - position[:, None])[None] * slopes[:, None, None]
        bias = bias.masked_fill(position > position[:, None], -torch.inf)[None].to(q.dtype)
        methods["alibi"] = run(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=bias), q, k, v)
        methods["eager"] = run(eager_formula, q, k, v, log_decay)
    if q.device.type == "cuda":
        methods["flex"] = run(flex_alibi(heads, length, q.device), q, k, v)
    if scores <= COMPILE_LIMIT:
        methods["compiled"] = run(torch.compile(eager_formula), q, k, v, log_decay)
    return methods


def flex_alibi(heads: int, length: int, device: torch.device) -> Callable[..., Tensor]:
    """FlexAttention, compiled, with ALiBi's bias and a causal block mask."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1, device=device) / heads)

    def bias(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score + (key - query) * slopes[head]

    def causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    mask = create_block_mask(causal, None, None, length, length, device=device)
    compiled = torch.compile(flex_attention)
    return lambda q, k, v: compiled(q, k, v, score_mod=bias, block_mask=mask)


def eager_formula(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    """The mechanism as one writes it down: no bounds, no canonical recheck, full matrices."""
    import torch

    length = q.shape[2]
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[3])
    keep = (scores > 0) & torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    distance = keep.flip(-1).cumsum(-1).flip(-1)
    logits = (scores + log_decay.unsqueeze(-1) * distance).masked_fill(~keep, -torch.inf)
    return torch.nan_to_num(torch.softmax(logits, -1)) @ v


def measure(
    wanted: list[str],
    inputs: tuple[Tensor, ...],
    decay: str,
    passes: str,
    rounds: int,
    seconds: float,
    limit: int,
    clock: str = "wall",
) -> list[JsonObject]:
    """Rows for one set of inputs: medians, and ratios of the same round to SDPA."""
    from traformer.ops import attention_stats

    q, k, _, log_decay = inputs
    length = q.shape[2]
    methods = {name: f for name, f in callables(inputs, passes, length <= limit).items() if name in wanted}
    now = clock_of(clock, q.device)
    began = time.perf_counter()
    for function in methods.values():
        function()
    times: dict[str, list[float]] = {name: [] for name in methods}
    began = now() if q.device.type == "cuda" else began  # the first call of a method on a GPU compiles it
    for function in methods.values() if q.device.type == "cuda" else ():
        function()
    first = (now() if q.device.type == "cuda" else time.perf_counter()) - began
    for _ in range(max(3, min(rounds, int(seconds / max(first, 1e-6))))):
        for name, function in methods.items():
            start = now()
            function()
            times[name].append(now() - start)
    stats = attention_stats(q, k, log_decay, needs_grad=passes == "both")
    rows = []
    for name, taken in times.items():
        row: JsonObject = {
            "benchmark": "attention", "method": name, "decay": decay, "pass": passes, "batch": q.shape[0],
            "heads": q.shape[1], "length": length, "head_size": q.shape[3], "rounds": len(taken),
            "ms": statistics.median(taken) * 1e3, "ms_low": quartile(taken, 1) * 1e3,
            "ms_high": quartile(taken, 3) * 1e3,
        }  # fmt: skip
        if "sdpa" in times and name != "sdpa":
            ratios = [a / b for a, b in zip(times["sdpa"], taken, strict=True)]
            row |= {
                "ratio": statistics.median(ratios),
                "ratio_low": quartile(ratios, 1),
                "ratio_high": quartile(ratios, 3),
            }
        if name == "tra":
            row["keys_read"] = stats.read.float().mean().item()
            row["keys_kept"] = stats.kept.float().mean().item()
        rows.append(row)
    return rows


def compare_decays(passes: str, head_size: int, rounds: int, clock: str = "wall") -> JsonObject:
    """Time of tra_full as at the start over that with heads that never forget: the same keys, in the same rounds."""
    calls = {
        decay: callables(draw(*DENORMAL_SHAPE, head_size, decay), passes, True)["tra_full"]
        for decay in ("init", "long")
    }
    now = time.process_time if clock == "cpu" else time.perf_counter
    times: dict[str, list[float]] = {decay: [] for decay in calls}
    for i in range(1 + max(2, rounds)):
        for decay, call in calls.items():
            start = now()
            call()
            if i:  # the first round warms up
                times[decay].append(now() - start)
    ratios = [a / b for a, b in zip(times["init"], times["long"], strict=True)]
    batch, heads, length = DENORMAL_SHAPE
    return {
        "benchmark": "denormals", "pass": passes, "batch": batch, "heads": heads, "length": length,
        "head_size": head_size, "rounds": len(ratios), "init_ms": statistics.median(times["init"]) * 1e3,
        "long_ms": statistics.median(times["long"]) * 1e3, "ratio": statistics.median(ratios),
        "ratio_low": quartile(ratios, 1), "ratio_high": quartile(ratios, 3),
    }  # fmt: skip


def denormal_table(rows: list[JsonObject]) -> str:
    lines = ["| every key read, length (B, H) | pass | init ms | long ms | init over long (about 1) |",
             "|---|---|---|---|---|"]  # fmt: skip
    lines += [
        f"| {r['length']} ({r['batch']}, {r['heads']}) | {r['pass']} | {r['init_ms']:.2f} | {r['long_ms']:.2f} "
        f"| {r['ratio']:.2f} [{r['ratio_low']:.2f}, {r['ratio_high']:.2f}] |"
        for r in rows
    ]
    return "\n".join(lines)


def quartile(values: list[float], which: int) -> float:
    return statistics.quantiles(values, n=4, method="inclusive")[which - 1]


_MEMORY_SCRIPT = """
import sys, torch
from traformer.benchmarks.attention import callables, draw, peak_kib
batch, heads, length, size, threads = map(int, sys.argv[3:8])
torch.set_num_threads(threads)
callables(draw(1, 1, 128, size, "init"), sys.argv[2], True)[sys.argv[1]]()
before = peak_kib()
callables(draw(batch, heads, length, size, sys.argv[8]), sys.argv[2], True)[sys.argv[1]]()
print((peak_kib() - before) / 1024)
"""


def peak_kib() -> int:
    """Most memory this process has held, in KiB. (getrusage would report its parent's, which exec keeps.)"""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def peak_memory(row: JsonObject, head_size: int, threads: int) -> float:
    """MiB above an idle process, inputs included, in a process of its own."""
    numbers = [row["batch"], row["heads"], row["length"], head_size, threads]
    command = [sys.executable, "-c", _MEMORY_SCRIPT, row["method"], row["pass"], *map(str, numbers), row["decay"]]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def markdown(rows: list[JsonObject]) -> str:
    lines = ["| length (B, H) | decay | pass | method | ms [middle half] | times SDPA's speed | keys read | peak MiB |",
             "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for row in rows:
        ratio = f"{row['ratio']:.2f} [{row['ratio_low']:.2f}, {row['ratio_high']:.2f}]" if "ratio" in row else ""
        read = f"{row['keys_read']:.0f}" if "keys_read" in row else ""
        peak = f"{row['peak_mib']:.0f}" if "peak_mib" in row else ""
        lines.append(
            f"| {row['length']} ({row['batch']}, {row['heads']}) | {row['decay']} | {row['pass']} | {row['method']} "
            f"| {row['ms']:.2f} [{row['ms_low']:.2f}, {row['ms_high']:.2f}] | {ratio} | {read} | {peak} |"
        )
    return "\n".join(lines)


def plot(rows: list[JsonObject], path: Path) -> None:
    """Milliseconds per (batch, head) by length, both axes logarithmic; one panel per pass."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    passes = list(dict.fromkeys(row["pass"] for row in rows))
    figure, axes = plt.subplots(1, len(passes), figsize=(5.5 * len(passes), 4.2), squeeze=False)
    for axis, name in zip(axes[0], passes, strict=True):
        for method, decay in dict.fromkeys((row["method"], row["decay"]) for row in rows):
            if method == "sdpa" and decay != rows[0]["decay"]:
                continue  # its time does not depend on the decay
            line = [row for row in rows if (row["method"], row["decay"], row["pass"]) == (method, decay, name)]
            label = method if method == "sdpa" else f"{method}, {decay}"
            axis.loglog(
                [r["length"] for r in line], [r["ms"] / r["batch"] / r["heads"] for r in line], "o-", label=label
            )
        axis.set_title("forward" if name == "forward" else "forward and backward")
        axis.set_xlabel("length")
        axis.set_ylabel("ms per head")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
