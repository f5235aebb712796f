"""Recall of planted facts: what a language model still knows of a sentence that it read so many tokens ago.

Facts are planted into real text at even depths, from its start (depth 0) to its end (depth 1). The text is read once,
chunk by chunk, through the model's cache; then each fact is asked for from there. A fact counts as recalled if every
token of its answer is the likeliest one. Half of the facts are pass keys (five digits that nothing else gives away),
half are sentences about made-up people.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from traformer.data.tokenizers import TextTokenizer
from traformer.devices import flush_denormals
from traformer.errors import InputError

CHUNK = 1024
_CITIES = ("Oslo", "Lima", "Cairo", "Quebec", "Nairobi", "Lisbon", "Hanoi", "Perth", "Krakow", "Bogota")
_PEOPLE = ("Clara", "Edmund", "Ingrid", "Rashid", "Mei", "Tobias", "Amara", "Pavel", "Yuki", "Leonor")
_THINGS = ("violin", "telescope", "dictionary", "raincoat", "bicycle", "lantern", "notebook", "kettle", "drum", "globe")
_PLACES = ("cellar", "attic", "garage", "library", "kitchen", "chapel", "stable", "tower", "bakery", "harbour")
_COLOURS = ("blue", "green", "yellow", "white", "purple", "orange", "grey", "brown", "golden", "scarlet")


@dataclass(frozen=True)
class Fact:
    """A sentence to plant, the words that ask for it, and the words that answer."""

    kind: str  # "pass key" or "sentence"
    statement: str
    question: str
    answer: str


@dataclass(frozen=True)
class Recall:
    """What came of one fact."""

    kind: str
    depth: float  # 0: at the start of the text, 1: at its end
    is_right: bool


@dataclass(frozen=True)
class Reading:
    """The recalls of one text, and what reading it cost in processor time."""

    recalls: list[Recall]
    prefill_tokens: int
    prefill_seconds: float  # of processor time, all threads
    decode_tokens: int
    decode_seconds: float


def make_facts(count: int, seed: int) -> list[Fact]:
    """Facts of both kinds in turn; names within one text do not recur."""
    most = 2 * len(_CITIES)
    if not 1 <= count <= most:
        raise InputError(f"the number of facts must lie between 1 and {most}, not {count}")
    draws = np.random.default_rng(seed)
    cities, people = draws.permutation(_CITIES), draws.permutation(_PEOPLE)
    facts = []
    for number in range(count):
        if number % 2 == 0:
            city, key = cities[number // 2], draws.integers(10_000, 100_000)
            stem = f"The pass key of {city} is"
            facts.append(
                Fact("pass key", f"{stem} {key}. Remember it: the pass key of {city} is {key}.", stem, f" {key}")
            )
        else:
            person, thing = people[number // 2], draws.choice(_THINGS)
            stem = f"{person} keeps the {thing} in the"
            answer = f" {draws.choice(_COLOURS)} {draws.choice(_PLACES)}"
            facts.append(Fact("sentence", f"{stem}{answer}.", stem, answer))
    return facts


def plant(
    tokenizer: TextTokenizer, filler: NDArray[Any], facts: Sequence[Fact], length: int
) -> tuple[list[int], list[float]]:
    """Token ids, `length` of them, with the facts among the filler's tokens, and each fact's depth."""
    planted = [tokenizer.encode(f" {fact.statement} ") for fact in facts]
    room = length - sum(map(len, planted))
    if room < len(facts):
        raise InputError(f"{length} tokens are too few for {len(facts)} facts of {length - room} tokens")
    if room > len(filler):
        raise InputError(f"the text has {len(filler):,} tokens, too few to plant facts into {length:,}; give more text")
    depths = [number / max(1, len(facts) - 1) for number in range(len(facts))]
    ids: list[int] = []
    read = 0
    for depth, fact in zip(depths, planted, strict=True):
        upto = round(depth * room)
        ids += [*filler[read:upto].tolist(), *fact]
        read = upto
    return ids, depths


@flush_denormals()
@torch.inference_mode()
def ask(
    model: Any, tokenizer: TextTokenizer, ids: Sequence[int], facts: Sequence[Fact], depths: Sequence[float]
) -> Reading:
    """Read the text once, then ask for each fact; what one question added to the cache is forgotten before the next."""
    started = time.process_time()
    cache = prefill(model, ids)
    prefill_seconds = time.process_time() - started
    recalls, asked = [], 0
    started = time.process_time()
    for fact, depth in zip(facts, depths, strict=True):
        question, answer = tokenizer.encode(f"\n{fact.question}"), tokenizer.encode(fact.answer)
        tokens = torch.tensor([[*question, *answer[:-1]]], device=model.device)
        # One by one, as in generation, so that the time is that of decoding.
        hidden = [
            model.base_model(input_ids=tokens[:, t : t + 1], past_key_values=cache, use_cache=True).last_hidden_state
            for t in range(tokens.shape[1])
        ]
        cache.crop(-tokens.shape[1])
        asked += tokens.shape[1]
        likeliest = model.get_output_embeddings()(torch.cat(hidden[len(question) - 1 :], dim=1)).argmax(-1)[0]
        recalls.append(Recall(fact.kind, depth, likeliest.tolist() == answer))
    return Reading(recalls, len(ids), prefill_seconds, asked, time.process_time() - started)


def prefill(model: Any, ids: Sequence[int], chunk: int = CHUNK) -> Any:
    """The model's cache after reading some tokens, a chunk at a time."""
    from transformers import DynamicCache

    make = getattr(model.base_model, "new_cache", None)
    cache = make() if make is not None else DynamicCache(config=model.config)
    tokens: Tensor = torch.tensor([list(ids)], device=model.device)
    for part in tokens.split(chunk, dim=1):
        model.base_model(input_ids=part, past_key_values=cache, use_cache=True)
    return cache
