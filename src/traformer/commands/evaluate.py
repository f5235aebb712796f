"""`tra eval RUN`: accuracy by length; perplexity by window for text."""

from __future__ import annotations

import argparse

from traformer.commands.arguments import (
    add_device,
    add_json,
    add_lengths,
    add_threads,
    joined,
    positive_int,
    print_json,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="a run folder")
    add_lengths(parser)
    parser.add_argument(
        "--examples",
        type=positive_int,
        default=256,
        help="sequences per length and split; for text, this times 8,192 tokens at every window (default 256)",
    )
    parser.add_argument("--seed", type=int, help="seed of the test examples (default: the run's seed)")
    parser.add_argument("--step", type=positive_int, help="a checkpoint's step (default: the newest)")
    parser.add_argument(
        "--batch-tokens", type=positive_int, help="tokens per batch (default: chosen by the memory that is free)"
    )
    add_device(parser)
    add_threads(parser)
    parser.add_argument("--again", action="store_true", help="measure again what results.json already has")
    parser.add_argument(
        "--overlap",
        action=argparse.BooleanOptionalAction,
        help="count test examples that also occurred in training (default: only where that is quick)",
    )
    add_json(parser)
    text = parser.add_argument_group("text runs")
    text.add_argument(
        "--stride",
        type=positive_int,
        help="use sliding windows with this stride in tokens (default: the window less one)",
    )
    text.add_argument(
        "--frame",
        type=positive_int,
        metavar="TOKENS",
        help="sort losses by place in windows of so many tokens, and by the recurrences that these hold, whatever "
        "window is read: two readings can then be compared on the same tokens (default: the window that is read)",
    )
    text.add_argument("--split", help="train, validation, test or all (default validation)")
    text.add_argument(
        "--data", metavar="PATH", help="evaluate on this text instead of the run's own, with the run's tokenizer"
    )


def main(args: argparse.Namespace) -> None:
    from traformer.commands.watching import ShownWatcher, announce

    announce(args.run, args.step)
    from traformer.devices import set_threads
    from traformer.evaluation.evaluate import evaluate_run
    from traformer.evaluation.table import results_table
    from traformer.terminal import show

    set_threads(args.threads)
    with ShownWatcher() as watcher:
        rows = evaluate_run(
            args.run,
            joined(args.lengths),
            args.examples,
            seed=args.seed,
            step=args.step,
            batch_tokens=args.batch_tokens,
            device=args.device,
            count_overlap=args.overlap,
            again=args.again,
            watcher=watcher,
            stride=args.stride,
            frame=args.frame,
            split=args.split,
            data=args.data,
        )
    if args.json:
        print_json([row.to_row() for row in rows])
        return
    first = rows[0]
    title = f"{args.run}: {first.task}, {first.attention}, trained to {first.train_length}, step {first.step}"
    show(results_table(rows, title))
    if first.protocol:
        from traformer.evaluation.perplexity import position_text
        from traformer.evaluation.protocols import protocol_text

        print(protocol_text(first.protocol))
        print(position_text(rows))
    print(f"written to {args.run}/results.json; a page from it: tra report {args.run}")
