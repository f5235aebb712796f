"""`tra generate RUN --prompt ...`: a trained model goes on from a prompt, token by token."""

from __future__ import annotations

import argparse
import sys

from traformer.commands.arguments import positive_int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="a run folder")
    parser.add_argument(
        "--prompt", required=True, help="tokens as `tra show` prints them, or text; - reads them from stdin"
    )
    parser.add_argument(
        "--max-new-tokens", type=positive_int, default=128, metavar="N", help="at most so many (default 128)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="draw tokens at it; 0 takes the likeliest (default)"
    )
    parser.add_argument("--top-k", type=positive_int, help="draw among the k likeliest only")
    parser.add_argument("--top-p", type=float, help="draw among the likeliest that make up this share only")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default 0)")
    parser.add_argument("--step", type=positive_int, help="a checkpoint's step (default: the newest)")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto (default auto)")


def main(args: argparse.Namespace) -> int:
    from traformer.evaluation.generate import Sampling, generate_from_run

    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed)
    if args.prompt != "-":
        print(prompt, end="", flush=True)  # the line then reads as a whole
    result = generate_from_run(
        args.run,
        prompt,
        device=args.device,
        step=args.step,
        max_new_tokens=args.max_new_tokens,
        sampling=sampling,
        on_text=lambda text: print(text, end="", flush=True),
    )
    print()
    if result.ended_by == "interrupted":
        print(f"tra: interrupted after {len(result.ids)} tokens", file=sys.stderr)
        return 130
    return 0
