"""`tra generate RUN --prompt ...`: a trained model continues a prompt, token by token."""

from __future__ import annotations

import argparse
import sys

from traformer.commands.arguments import add_device, add_threads, positive_int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="a run folder")
    parser.add_argument(
        "--prompt", required=True, help="tokens as `tra show` prints them, or text; - reads them from stdin"
    )
    parser.add_argument(
        "--max-new-tokens",
        type=positive_int,
        default=128,
        metavar="N",
        help="maximum number of new tokens (default 128)",
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="sampling temperature; 0 takes the most likely token (default)"
    )
    parser.add_argument("--top-k", type=positive_int, help="sample only from the k most likely tokens")
    parser.add_argument(
        "--top-p", type=float, help="sample only from the most likely tokens that together have this probability"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default 0)")
    parser.add_argument("--step", type=positive_int, help="a checkpoint's step (default: the newest)")
    add_device(parser)
    add_threads(parser)


def main(args: argparse.Namespace) -> int:
    from traformer.runs.folder import RunFolder

    RunFolder.open(args.run).step_to_use(args.step)  # refused at once, before torch is loaded
    from traformer.devices import set_threads
    from traformer.evaluation.generate import Sampling, generate_text
    from traformer.models.from_run import load_run
    from traformer.terminal import say

    set_threads(args.threads)
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed)
    model, task, _, _ = load_run(args.run, device=args.device, step=args.step)
    waiting = [] if args.prompt == "-" else [prompt]  # printed with the first token, so that the line reads as a whole

    def on_text(text: str) -> None:
        while waiting:
            print(waiting.pop(), end="")
        print(text, end="", flush=True)

    result = generate_text(model, task, prompt, max_new_tokens=args.max_new_tokens, sampling=sampling, on_text=on_text)
    on_text("\n")
    if result.ended_by == "interrupted":
        say(f"tra: interrupted after {len(result.ids)} tokens")
        return 130
    return 0
