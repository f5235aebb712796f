"""Experiments: Python lists of cells for `tra sweep`. Loads without torch."""

from __future__ import annotations

# name of a module of this package that has `cells() -> list[Cell]`: what it shows
EXPERIMENTS: dict[str, str] = {
    "demo": "TRA beside RoPE on flip-flop and induction, to 8 times the training length",
    "text": "perplexity by window, 128 to 4096, trained at 128: TRA beside RoPE, ALiBi, NoPE, FoT and tra_plus",
    "peers": "TRA, its ablations, extensions and peers on flip-flop and copy: 4 seeds, to 8 times the length",
    "peers_lr": "the learning-rate search that comes before it",
    "what_works": "tra_plus with its parts left out one by one, and its peers: rates searched, 5 seeds, hypotheses",
    "copy_recipe": "two recipes on copy, 3,000 steps, to 16 times the trained length: 5 seeds, hypotheses",
    "copy_wide": "the second of these at twice the width, and other mechanisms in its place: 5 seeds, hypotheses",
    "copy_batch": "the second of these with batches of 256, chosen by errors at the trained length: 5 seeds",
    "copy_longer": "the same with twice the steps: 5 seeds, hypotheses",
    "copy_previous": "tra_previous, one method for every layer, with such batches and steps: 5 seeds, hypotheses",
    "recall_in_text": "recall of pairs scattered in text, 128 tokens to 8,192: rates searched, 5 seeds, hypotheses",
    "text_reach": "text trained at a window of 512, read to 16,384: is the far context used? 5 seeds, hypotheses",
    "text_far": "what teaches it to use that context: judged by recurrence, 5 seeds, hypotheses",
    "text_gain": "what a long window gains on the same tokens, with TRA's and with FoT's gates: 5 seeds, hypotheses",
    "recall_learning": "which division of heads learns recall in text, with and without a curriculum",
    "copy_seeds": "4 seeds of TRA, tra_plus and RoPE on copy, checkpoints every 50 steps: which heads form, and when",
}
