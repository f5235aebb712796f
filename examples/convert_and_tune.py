"""Put TRA into a trained decoder, tune it for a while, and see what it knows at and beyond the training window.

    python examples/convert_and_tune.py                                   # a small Llama, trained here, on bytes
    python examples/convert_and_tune.py --text war-and-peace.txt --pretrain 2000 --tune 1000
    python examples/convert_and_tune.py --model gpt2 --text wiki.txt --window 512 --lr 5e-5

Measured on text that none was trained on, at the training window and at multiples of it: the source, the source tuned
as long as the converted model (so that the comparison is one of attention, not of training), and the converted model
before and after tuning. A number is the perplexity of all tokens but the first of windows of that length.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import traformer
from traformer.errors import InputError, TraformerError

REPOSITORY = Path(__file__).resolve().parents[1]


def read_text(place: str | None) -> str:
    """A file, all .txt and .tokens files of a folder, or (by default) this repository's own sources and documents."""
    if place is None:
        files = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/*.md"), *REPOSITORY.glob("src/**/*.py")]
    elif Path(place).is_dir():
        files = [*Path(place).glob("**/*.txt"), *Path(place).glob("**/*.tokens")]
    else:
        files = [Path(place)]
    try:
        text = "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in sorted(files))
    except OSError as error:
        raise InputError(f"cannot read {error.filename}: {error.strerror}") from None
    if not text:
        raise InputError(f"{place} holds no text")
    return text


def tokenize(text: str, model_name: str | None) -> torch.Tensor:
    """The model's own tokens, or bytes for the small model."""
    if model_name is None:
        return torch.tensor(list(text.encode("utf-8")))
    tokenizer = AutoTokenizer.from_pretrained(model_name)
    return tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]


def small_model(window: int, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=2,
            max_position_embeddings=window, bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip


def train(model: PreTrainedModel, tokens: torch.Tensor, steps: int, args: argparse.Namespace, label: str) -> None:
    """Windows drawn at random, AdamW, a short warm-up and a cosine to zero; the same draws for every model."""
    draws = torch.Generator().manual_seed(args.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    model.train()
    clock, shown = time.perf_counter(), 0.0
    for step in range(steps):
        share = min(1.0, (step + 1) / max(1, 0.05 * steps)) * 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = args.lr * share
        starts = torch.randint(0, len(tokens) - args.window, (args.batch,), generator=draws)
        batch = torch.stack([tokens[start : start + args.window] for start in starts])
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if time.perf_counter() - shown > 5 or step + 1 == steps:
            shown = time.perf_counter()
            print(f"  {label}: step {step + 1}/{steps}  loss {loss.item():.3f}  {shown - clock:.0f} s", file=sys.stderr)


@torch.inference_mode()
def perplexity(model: PreTrainedModel, tokens: torch.Tensor, length: int) -> float | None:
    """Over windows of `length` that lie side by side; None where the model cannot read so far (learned positions)."""
    model.eval()
    windows = tokens[: len(tokens) // length * length].view(-1, length)
    total, count = 0.0, 0
    try:
        for window in windows:
            loss = model(input_ids=window[None], labels=window[None], use_cache=False).loss
            total, count = total + loss.item() * (length - 1), count + length - 1
    except (IndexError, InputError):
        return None
    return math.exp(min(total / count, 20.0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", help="a text file or folder (default: this repository's sources and documents)")
    parser.add_argument("--model", help="a hub name or folder (default: a small Llama that is trained here)")
    parser.add_argument("--attention", default="tra", help="what to put in (default tra)")
    parser.add_argument(
        "--qk-norm", action=argparse.BooleanOptionalAction, help="norm queries and keys (default: as convert decides)"
    )
    parser.add_argument("--window", type=int, default=128, help="training window in tokens (default 128)")
    parser.add_argument("--pretrain", type=int, default=600, help="steps for the small model (default 600)")
    parser.add_argument("--tune", type=int, default=300, help="steps after the conversion (default 300)")
    parser.add_argument("--batch", type=int, default=16, help="windows a step (default 16)")
    parser.add_argument(
        "--lr", type=float, default=2e-3, help="peak learning rate (default 2e-3; less for a large model)"
    )
    parser.add_argument("--measure", type=int, default=16_384, help="held-out tokens measured (default 16,384)")
    parser.add_argument("--factors", default="1,2,4,8,16", help="windows measured, in training windows")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", help="where to save the tuned model")
    args = parser.parse_args()

    tokens = tokenize(read_text(args.text), args.model)
    lengths = [args.window * int(factor) for factor in args.factors.split(",")]
    held_out = max(args.measure, lengths[-1])
    if len(tokens) < 4 * held_out:
        raise InputError(f"the text has {len(tokens):,} tokens, too few to hold {held_out:,} of them out")
    training, test = tokens[:-held_out], tokens[-held_out:]

    if args.model is None:
        source = small_model(args.window, args.seed)
        train(source, training, args.pretrain, args, "training the source")
    else:
        source = AutoModelForCausalLM.from_pretrained(args.model)
    converted = traformer.convert(source, args.attention, qk_norm=args.qk_norm)
    results = {
        "source": [perplexity(source, test, length) for length in lengths],
        f"converted to {args.attention}": [perplexity(converted, test, length) for length in lengths],
    }
    control = copy.deepcopy(source)
    train(control, training, args.tune, args, "tuning the source")
    train(converted, training, args.tune, args, "tuning the converted model")
    results["source, tuned"] = [perplexity(control, test, length) for length in lengths]
    results[f"converted to {args.attention}, tuned"] = [perplexity(converted, test, length) for length in lengths]

    print(f"perplexity of {held_out:,} held-out tokens by window; trained at {args.window}")
    print(f"{'':<28}" + "".join(f"{length:>10,}" for length in lengths))
    for name, row in results.items():
        print(f"{name:<28}" + "".join(f"{'-' if value is None else f'{value:.2f}':>10}" for value in row))
    if args.save:
        converted.save_pretrained(args.save)
        print(f"saved; AutoModelForCausalLM.from_pretrained({args.save!r}) reads it after `import traformer.models`")


if __name__ == "__main__":
    try:
        main()
    except TraformerError as error:
        sys.exit(f"error: {error}")
