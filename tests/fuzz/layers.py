"""Every method in a small model: a cache in any chunks, and padding anywhere, change nothing.

In double precision, where no score comes within rounding of a threshold by chance.
"""

from __future__ import annotations

import functools

import torch
from hypothesis import strategies as st

from traformer.methods import METHODS
from traformer.models import TraformerConfig, TraformerForCausalLM
from traformer.models.cache import TraformerCache

VOCABULARY = 23


@functools.lru_cache(maxsize=64)
def _model(name: str, seed: int, kv_heads: int, layers: int) -> TraformerForCausalLM:
    torch.manual_seed(seed)
    config = TraformerConfig(
        attention=name, vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=kv_heads,
    )  # fmt: skip
    return TraformerForCausalLM(config).eval().double()


def _models() -> st.SearchStrategy[tuple[str, int, int, int]]:
    return st.tuples(
        st.sampled_from(sorted(METHODS)), st.integers(0, 1), st.sampled_from([4, 2]), st.sampled_from([1, 2])
    )


@st.composite
def cache_cases(draw: st.DrawFn) -> tuple[tuple[str, int, int, int], int, list[int]]:
    """Model, seed of its tokens, sizes of the chunks."""
    chunks = draw(st.lists(st.one_of(st.just(1), st.integers(1, 12)), min_size=1, max_size=5))
    return draw(_models()), draw(st.integers(0, 10**6)), chunks


def check_cache(case: tuple[tuple[str, int, int, int], int, list[int]]) -> None:
    which, seed, chunks = case
    model = _model(*which)
    x = torch.randint(1, VOCABULARY, (2, sum(chunks)), generator=torch.Generator().manual_seed(seed))
    cache = TraformerCache(model.config)
    parts = []
    with torch.no_grad():
        expected = model(x, use_cache=False).logits
        for part in x.split(chunks, 1):
            parts.append(model(part, past_key_values=cache, use_cache=True).logits)
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-7, atol=1e-8)
    assert int(cache.get_seq_length()) == x.shape[1]


@st.composite
def padding_cases(draw: st.DrawFn) -> tuple[tuple[str, int, int, int], int, list[int], list[int]]:
    """Model, seed of its tokens, lengths of three sequences, padding to the left of each."""
    lengths = draw(st.lists(st.integers(1, 15), min_size=1, max_size=3))
    left = draw(st.lists(st.integers(0, 5), min_size=len(lengths), max_size=len(lengths)))
    return draw(_models()), draw(st.integers(0, 10**6)), lengths, left


def check_padding(case: tuple[tuple[str, int, int, int], int, list[int], list[int]]) -> None:
    which, seed, lengths, left = case
    model = _model(*which)
    width = max(a + b for a, b in zip(lengths, left, strict=True))
    x = torch.randint(1, VOCABULARY, (len(lengths), width), generator=torch.Generator().manual_seed(seed))
    mask = torch.zeros_like(x)
    for row, (length, start) in enumerate(zip(lengths, left, strict=True)):
        mask[row, start : start + length] = 1
    with torch.no_grad():
        logits = model(x, attention_mask=mask, use_cache=False).logits
        for row, (length, start) in enumerate(zip(lengths, left, strict=True)):
            alone = model(x[row : row + 1, start : start + length], use_cache=False).logits[0]
            torch.testing.assert_close(logits[row, start : start + length], alone, rtol=1e-7, atol=1e-8)
