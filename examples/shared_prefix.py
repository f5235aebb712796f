"""Read a long prefix once, use it many times: cut, repeat and join the cache of a TRA model.

    python examples/shared_prefix.py [--prefix 4096] [--questions 8]

In TRA a key carries no position, so a piece of a cache means the same wherever it stands. The example checks the
shortcuts against the plain forward they stand for and says what each costs. The model is random: the cache is shown.
"""

from __future__ import annotations

import argparse
import time

import torch

from traformer import TraformerConfig, TraformerForCausalLM
from traformer.models import TraformerCache


def timed(label: str, run):
    start = time.perf_counter()
    result = run()
    print(f"{label:<58} {1000 * (time.perf_counter() - start):9.1f} ms")
    return result


def check(label: str, result: torch.Tensor, expected: torch.Tensor) -> None:
    difference = (result - expected).abs().max().item()
    assert torch.allclose(result, expected, rtol=1e-4, atol=1e-4), f"{label}: differs by {difference}"
    print(f"  same logits as the plain forward (largest difference {difference:.1e})")


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description="Share a prefix between many continuations of a TRA model.")
    parser.add_argument("--prefix", type=int, default=4096, help="tokens of the shared prefix (default 4096)")
    parser.add_argument("--questions", type=int, default=8, help="continuations (default 8)")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = TraformerForCausalLM(
        TraformerConfig(attention="tra", vocab_size=256, hidden_size=128, num_hidden_layers=2)
    ).eval()
    prefix = torch.randint(1, 256, (1, args.prefix))
    questions = torch.randint(1, 256, (args.questions, 16))

    # 1. The prefix is read once; its cache, repeated, serves a whole batch of continuations.
    cache = TraformerCache(model.config)
    timed(f"read the prefix, {args.prefix} tokens", lambda: model(prefix, past_key_values=cache, logits_to_keep=1))
    shared = timed(
        f"{args.questions} continuations on the cache, repeated",
        lambda: model(questions, past_key_values=cache.repeat(args.questions)).logits,
    )
    whole = torch.cat([prefix.expand(args.questions, -1), questions], 1)
    plain = timed(
        f"{args.questions} continuations with the prefix read each time",
        lambda: model(whole, use_cache=False, logits_to_keep=questions.shape[1]).logits,
    )
    check("repeat", shared, plain)

    # 2. Take back what was said: the cache up to any point is the cache of the text up to there.
    half = args.prefix // 2
    first_half = cache.cut(0, half)
    result = model(questions[:1], past_key_values=first_half).logits
    print(f"the first {half} tokens, cut out of the cache")
    check("cut", result, model(torch.cat([prefix[:, :half], questions[:1]], 1), use_cache=False).logits[:, half:])

    # 3. Texts read apart, joined in any order: each was read for itself, and what comes next sees them all.
    notes = [torch.randint(1, 256, (1, 32 + 8 * i)) for i in range(3)]
    caches = []
    for note in notes:
        caches.append(TraformerCache(model.config))
        model(note, past_key_values=caches[-1], logits_to_keep=1)
    joined = TraformerCache.join([caches[2], caches[0], caches[1]])
    again = TraformerCache.join([TraformerCache.join([caches[2], caches[0]]), caches[1]])
    print(f"{len(notes)} texts of {[note.shape[1] for note in notes]} tokens, joined to {joined.get_seq_length()}")
    left, right = (model(questions[:1], past_key_values=x).logits for x in (joined, again))
    assert torch.equal(left, right)
    print("  joined in one go or step by step: bit for bit the same")


if __name__ == "__main__":
    main()
