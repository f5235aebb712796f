"""`tra layers MODEL --data TEXT`: which layers of a trained decoder recall, and so are the ones to convert."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from traformer.commands.arguments import add_json, positive_int, print_json
from traformer.errors import InputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a model's folder, a GGUF file, or a name on the hub")
    parser.add_argument(
        "--data", required=True, metavar="TEXT", help="a file, a folder, or a name such as wikitext-103"
    )
    parser.add_argument("--count", type=positive_int, help="layers to choose (default: a quarter of them)")
    parser.add_argument("--length", type=positive_int, default=1024, help="tokens of a text (default 1024)")
    parser.add_argument(
        "--window", type=positive_int, default=128, help="keys that a layer sees which is tried (default 128)"
    )
    parser.add_argument("--texts", type=positive_int, default=3, help="texts with planted facts (default 3)")
    parser.add_argument("--attention", default="tra_straight_through", metavar="NAME", help="of the pattern printed")
    parser.add_argument("--threads", type=positive_int, help="CPU threads of torch (default: torch's own choice)")
    add_json(parser)


def main(args: argparse.Namespace) -> None:
    from traformer.data import Corpus
    from traformer.data.tokenizers import FastTokenizer
    from traformer.devices import set_threads
    from traformer.evaluation.recall_by_layer import recall_by_layer
    from traformer.methods import resolve_stack
    from traformer.models.sources import load_source
    from traformer.terminal import ProgressBar, new_table, show

    resolve_stack(args.attention)  # refuse a misspelt name before anything heavy is loaded
    set_threads(args.threads)
    corpus = Corpus([args.data])
    model, tokenizer = load_source(args.model)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise InputError(f"{args.model} has no fast tokenizer that transformers can load, so no text can be read")
    encoder = FastTokenizer(backend, args.model)
    text = corpus.open("train", encoder).tokens
    with ProgressBar() as bar:
        bar.start("planted facts", total=1)

        def progress(title: str, done: int, total: int) -> None:
            bar.update(title=title, completed=done, total=total)
            if not bar.is_live:
                bar.say(f"{done} of {total}: {title}")

        found = recall_by_layer(
            model.eval(), encoder, text, count=args.count, length=args.length, window=args.window, texts=args.texts,
            progress=progress,
        )  # fmt: skip
    pattern = found.pattern(args.attention)
    if args.json:
        print_json({**asdict(found), "attention": pattern})
        return
    table = new_table(
        f"Recall of planted facts, {args.length:,} tokens, windows of {args.window}",
        left=["sees only what is near"], right=["recalled", "log probability", "loss", ""],
    )  # fmt: skip
    rows = [("no layer", found.whole, ""), ("every layer", found.windowed, "")]
    rows += [
        (f"layer {layer}", one, "chosen" if layer in found.chosen else "") for layer, one in enumerate(found.without)
    ]
    rows.append(("all but the chosen", found.only_chosen, ""))
    for name, one, mark in rows:
        lost = found.whole.log_probability - one.log_probability
        table.add_row(name, f"{100 * one.share:.0f} %", f"{one.log_probability:.3f}", f"{lost:.3f}", mark)
    show(table)
    print(f"--attention {pattern}")
