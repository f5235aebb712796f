"""`tra convert MODEL --attention NAME --out DIR`: an attention of ours in a decoder that somebody has trained."""

from __future__ import annotations

import argparse
from pathlib import Path

from traformer.commands.arguments import key_value, options_once
from traformer.errors import InputError
from traformer.methods import resolve_stack


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a model's folder, a GGUF file, or a name on the hub")
    parser.add_argument(
        "--attention",
        default="tra_plus",
        metavar="NAME[,NAME...]",
        help="the new attention, or a pattern over the layers; `tra list attentions` lists them (default tra_plus)",
    )
    parser.add_argument(
        "--attention-option",
        type=key_value,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the attention; `tra list --options NAME` lists them",
    )
    parser.add_argument(
        "--qk-norm",
        action=argparse.BooleanOptionalAction,
        help="normalise queries and keys, or leave scores as the model was trained to make them (default: TRA does)",
    )
    parser.add_argument("--keep-positions", action="store_true", help="GPT-2: keep adding its learned positions")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for the new model; it must not exist yet")


def main(args: argparse.Namespace) -> None:
    options = options_once("--attention-option", args.attention_option)
    resolve_stack(args.attention, options)  # refuse a misspelt name before anything heavy is loaded
    out = Path(args.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} is there already; choose another --out")

    from traformer.models.conversion.convert import convert
    from traformer.models.sources import load_source
    from traformer.terminal import say

    model, tokenizer = load_source(args.model)
    converted = convert(
        model,
        args.attention,
        qk_norm=args.qk_norm,
        keep_positions=args.keep_positions,
        copy=False,
        **options,
    )
    converted.save_pretrained(out)
    if tokenizer is None:
        say(f"{args.model} has no tokenizer that transformers can load; give one when you train or generate")
    else:
        tokenizer.save_pretrained(out)
    count = sum(parameter.numel() for parameter in converted.parameters())
    print(f"{out}: {count:,} parameters, attention {args.attention}; it must be tuned to be of use")
