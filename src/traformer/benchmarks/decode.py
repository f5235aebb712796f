"""`tra bench decode`: time for one new token against a cache, and keys read, by context length."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from traformer.benchmarks.attention import DECAYS, describe_machine, machine_line, quartile
from traformer.commands.arguments import positive_int
from traformer.errors import unknown_name
from traformer.storage import check_file
from traformer.types import JsonObject

if TYPE_CHECKING:
    import torch


CONTEXTS = (1024, 4096, 16384, 65536, 262144)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `tra bench decode`."""
    parser.add_argument("--contexts", nargs="+", type=positive_int, default=list(CONTEXTS), metavar="N")
    parser.add_argument(
        "--decays", nargs="+", default=["init", "long"], metavar="NAME", help="init, long (default: both)"
    )
    parser.add_argument("--heads", type=positive_int, default=8)
    parser.add_argument("--head-size", type=positive_int, default=64)
    parser.add_argument("--rounds", type=positive_int, default=200, help="tokens timed (default 200)")
    parser.add_argument("--threads", type=positive_int, help="threads of torch (default: its own choice)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the table to FILE")


def main(args: argparse.Namespace) -> int:
    """Measure, print the table, write the rows where asked."""
    from traformer.devices import set_threads

    for name in args.decays:
        if name not in DECAYS[:2]:
            raise unknown_name("decay", name, DECAYS[:2])
    for path in (args.json, args.markdown):
        if path is not None:
            check_file(path)
    set_threads(args.threads)
    about = describe_machine(args.head_size)
    print(machine_line(about))
    rows = [
        row for decay in args.decays
        for row in measure(args.contexts, decay, args.heads, args.head_size, args.rounds)
    ]  # fmt: skip
    table = markdown(rows)
    print(table)
    if args.markdown is not None:
        args.markdown.write_text(f"{machine_line(about)}\n\n{table}\n", encoding="utf-8")
    if args.json is not None:
        args.json.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 0


def markdown(rows: list[JsonObject]) -> str:
    lines = ["| context | decay | tra us/token [middle half] | with key index | index upkeep us | sdpa us "
             "| tra over sdpa | read | kept |", "|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for r in rows:
        lines.append(
            f"| {r['context']} | {r['decay']} | {r['tra_us']:.0f} [{r['tra_us_low']:.0f}, {r['tra_us_high']:.0f}] "
            f"| {r['indexed_us']:.0f} | {r['append_us']:.0f} | {r['sdpa_us']:.0f} "
            f"| {r['tra_us'] / r['sdpa_us']:.2f} | {r['keys_read']:.0f} | {r['keys_kept']:.0f} |"
        )
    return "\n".join(lines)


def measure(contexts: list[int], decay: str, heads: int, head_size: int, rounds: int) -> list[JsonObject]:
    """Measure all contexts in turn within a round, so that load affects all equally."""
    import torch
    import torch.nn.functional as F

    from traformer.ops import KeyIndex, attention_stats, threshold_relative_attention

    generator = torch.Generator().manual_seed(0)

    def normed(*shape: int) -> torch.Tensor:
        x = torch.randn(*shape, generator=generator)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

    longest = max(contexts)
    keys, values = normed(1, heads, longest, head_size), torch.randn(1, heads, longest, head_size, generator=generator)
    queries = normed(rounds, 1, heads, 1, head_size)
    gates = torch.randn(rounds, 1, heads, 1, generator=generator) + (6.0 if decay == "long" else 0.0)
    decays = F.logsigmoid(gates)
    bound = head_size**0.5  # after QK-norm
    indices = {}
    for context in contexts:
        indices[context] = KeyIndex()
        indices[context].append(keys[:, :, :context])
    times: dict[tuple[int, str], list[float]] = {}
    read: dict[int, list[float]] = {context: [] for context in contexts}
    kept: dict[int, list[float]] = {context: [] for context in contexts}
    with torch.no_grad():
        # SDPA sweeps the whole cache through the processor's and would leave the next method a cold one: it has rounds
        # of its own. Within a round the contexts' order turns, so that none always comes after the same neighbour.
        for names in (("tra",), ("indexed",), ("append",), ("sdpa",)):
            for i in range(rounds):
                q, g = queries[i], decays[i]
                for step in range(len(contexts)):
                    context = contexts[(step + i) % len(contexts)]
                    k, v = keys[:, :, :context], values[:, :, :context]
                    fresh = KeyIndex()
                    fresh.append(keys[:, :, :65])
                    calls: dict[str, Callable[..., object]] = {
                        "tra": lambda q=q, k=k, v=v, g=g: threshold_relative_attention(q, k, v, g, score_bound=bound),
                        "indexed": lambda q=q, k=k, v=v, g=g, n=context: threshold_relative_attention(
                            q, k, v, g, score_bound=bound, key_index=indices[n]
                        ),
                        "sdpa": lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v),
                        "append": lambda fresh=fresh: fresh.append(keys[:, :, 65:66]),
                    }
                    for name in names:
                        start = time.perf_counter()
                        calls[name]()
                        times.setdefault((context, name), []).append((time.perf_counter() - start) * 1e6)
        for i in range(min(20, rounds)):
            for context in contexts:
                stats = attention_stats(queries[i], keys[:, :, :context], decays[i], score_bound=bound)
                read[context].append(stats.read.float().mean().item())
                kept[context].append(stats.kept.float().mean().item())
    rows = []
    for context in contexts:
        row: JsonObject = {"benchmark": "decode", "context": context, "decay": decay, "heads": heads}
        for name in ("tra", "indexed", "sdpa", "append"):
            taken = times[context, name][1:] or times[context, name]
            row |= {f"{name}_us": statistics.median(taken)}
            if len(taken) > 1:
                row |= {f"{name}_us_low": quartile(taken, 1), f"{name}_us_high": quartile(taken, 3)}
            else:
                row |= {f"{name}_us_low": taken[0], f"{name}_us_high": taken[0]}
        row |= {"keys_read": statistics.mean(read[context]), "keys_kept": statistics.mean(kept[context])}
        rows.append(row)
    return rows
