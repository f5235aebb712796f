"""`tra bench WHAT`: each benchmark is a module of `traformer.benchmarks`, imported only when it is named."""

from __future__ import annotations

import argparse
from importlib.util import find_spec

BENCHMARKS = {
    "tasks": "tokens per second of the task generators",
    "attention": "time and memory of the attention kernels by length",
    "decode": "time per token when decoding with a cache",
    "train": "time and memory of a training step, relative to RoPE",
    "lengths": "what training in parts of similar length saves",
    "predict": "predicted times of the GPU kernel on an A100 and an H100",
    "gpu": "run all benchmarks on this machine's GPU and write them to one folder",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from traformer.cli import add_commands

    table = {
        name: (f"traformer.benchmarks.{name}", summary)
        for name, summary in BENCHMARKS.items()
        if find_spec("traformer.benchmarks") and find_spec(f"traformer.benchmarks.{name}")
    }
    add_commands(parser, table, parser.get_default("rest"), "benchmark")


def main(args: argparse.Namespace) -> int | None:
    """Never reached: the named benchmark's own `main` takes its place."""
    raise AssertionError("a benchmark's own main runs in place of this")
