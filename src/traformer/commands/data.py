"""`tra data PATH`: tokenise a corpus into the cache, and report what is in it."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from traformer.commands.arguments import add_json, positive_int, print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "data", nargs="+", metavar="PATH", help="a file, a folder, or a name such as wikitext-103 or python-stdlib"
    )
    parser.add_argument(
        "--tokenizer",
        default="bytes",
        help="bytes, a folder with GPT-2's files, bpe:8192, or a hub name (default bytes)",
    )
    parser.add_argument("--separator", action="store_true", help="start every document with the end-of-text token")
    parser.add_argument("--show", type=positive_int, default=48, metavar="N", help="first tokens shown (default 48)")
    add_json(parser)


def main(args: argparse.Namespace) -> None:
    from traformer.data import Corpus, load_tokenizer
    from traformer.data.cache import cache_folder
    from traformer.terminal import new_table, show

    corpus = Corpus(args.data)
    tokenizer = load_tokenizer(args.tokenizer, corpus.training_text)
    headings = (
        "files",
        "documents",
        "bytes",
        "words",
        "line ends",
        "tokens",
        "bytes per token",
        "on disk as",
        "MB/s",
    )
    title = f"{corpus.name}, tokenizer {tokenizer.label} ({tokenizer.vocab_size:,} entries)"
    table = new_table(title, left=["split"], right=headings)
    texts = {split: corpus.open(split, tokenizer, args.separator) for split in corpus.splits()}
    if args.json:
        facts = {"tokenizer": tokenizer.label, "vocabulary": tokenizer.vocab_size}
        print_json(
            [
                {
                    "split": split,
                    **facts,
                    "files": len(text.meta["sources"]),
                    "documents": len(text.documents),
                    **asdict(text.counts),
                    "stored_as": text.dtype,
                    "starts": text.tokens[: args.show].tolist(),
                }
                for split, text in texts.items()
            ]
        )
        return
    for split, text in texts.items():
        counts = text.counts
        speed = text.meta["bytes"] / 1e6 / max(text.meta["seconds"], 1e-9)
        table.add_row(
            corpus.describe(split),
            f"{len(text.meta['sources']):,}",
            f"{len(text.documents):,}",
            *(f"{number:,}" for number in (counts.bytes, counts.words, counts.line_ends, counts.tokens)),
            f"{counts.bytes / counts.tokens:.2f}",
            text.dtype,
            f"{speed:,.1f}",
        )
    show(table)
    for split, text in texts.items():
        ids = text.tokens[: args.show].tolist()
        print(f"{split} starts: {tokenizer.decode(ids)!r}")
    print(f"MB/s: of text, when it was tokenised; kept in {cache_folder() / 'tokens'}")
