"""`tra bench gpu --name NAME`: every benchmark of this machine's GPU into results/gpu-NAME/, ready to be sent in.

It first runs the kernels' tests on the GPU, since a figure of a wrong kernel is worth nothing; then attention by length
against SDPA, FlexAttention and the eager formula, a training step, and the predictions beside what was measured.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path

from traformer.benchmarks.attention import benchmark_device
from traformer.errors import InputError

FOLDER = Path("results")
TESTS = Path("tests/ops/triton/kernels")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `tra bench gpu`."""
    parser.add_argument("--name", required=True, metavar="NAME", help="of the folder: results/gpu-NAME, e.g. a100")
    parser.add_argument("--quick", action="store_true", help="few lengths and rounds: to see that it works")


def main(args: argparse.Namespace) -> int:
    """Test, measure, write, and say where."""
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", args.name):
        raise InputError(f"--name {args.name}: letters, digits, '-', '_' and '.' only, since it names a folder")
    benchmark_device("cuda")
    folder = FOLDER / f"gpu-{args.name}"
    folder.mkdir(parents=True, exist_ok=True)
    if TESTS.is_dir():
        command = [sys.executable, "-m", "pytest", "-q", str(TESTS)]
        with (folder / "tests.txt").open("w", encoding="utf-8") as log:
            failed = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode
        print("tests: " + ("FAILED, see tests.txt; the figures below may be of wrong results" if failed else "passed"))
    else:
        print(f"tests: not run, {TESTS} is not here; run this from a checkout to include them")
    lengths = ["512", "2048"] if args.quick else ["512", "1024", "2048", "4096", "8192", "16384", "32768"]
    rounds = ["--rounds", "5" if args.quick else "30"]
    attention = folder / "attention.json"
    run(
        "attention", folder / "attention.txt", "--device", "cuda", "--dtype", "bfloat16", "--lengths", *lengths,
        "--methods", "tra", "tra_full", "sdpa", "flex", "eager", *rounds, "--json", str(attention),
    )  # fmt: skip
    run(
        "train", folder / "train.txt", "--device", "cuda", "--no-memory", "--sizes", "tiny" if args.quick else "mini",
        "--windows", *(["256"] if args.quick else ["256", "1024", "4096"]), "--json", str(folder / "train.json"),
    )  # fmt: skip
    run("predict", folder / "predicted.txt", "--lengths", *lengths, "--measured", str(attention))
    print(f"written: {folder}. To send it in, open an issue with the template 'GPU results' and attach the folder.")
    return 0


def run(benchmark: str, file: Path, *arguments: str) -> None:
    """One benchmark as its command would run it, its output into a file and onto the screen."""
    from traformer.cli import main as command

    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        status = command(["bench", benchmark, *arguments])
    file.write_text(output.getvalue(), encoding="utf-8")
    print(output.getvalue())
    if status:
        raise InputError(f"tra bench {benchmark} {' '.join(arguments)} failed; see its message above")
