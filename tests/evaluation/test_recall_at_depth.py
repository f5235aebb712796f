"""Recall of planted facts: where they stand, what is asked, and that the answer is the model's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import traformer
from tests.training.tiny_llama import TEXT, tiny_llama
from traformer.data.tokenizers import load_tokenizer
from traformer.errors import InputError
from traformer.evaluation.recall_at_depth import Fact, ask, make_facts, plant, prefill


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tiny_llama(tmp_path_factory.mktemp("recall") / "llama", layers=2)
    return AutoModelForCausalLM.from_pretrained(folder).eval(), load_tokenizer(str(folder))


def filler(tokenizer) -> np.ndarray:
    return np.array(tokenizer.encode(TEXT[:4000]))


def test_facts_of_one_text_do_not_share_names_and_seeds_give_others():
    facts = make_facts(20, seed=3)
    assert [fact.kind for fact in facts] == ["pass key", "sentence"] * 10
    assert len({fact.question for fact in facts}) == 20
    assert all(f"{fact.question}{fact.answer}." in fact.statement for fact in facts)
    assert make_facts(20, seed=3) == facts != make_facts(20, seed=4)
    with pytest.raises(InputError, match="between 1 and 20, not 21"):
        make_facts(21, seed=0)


def test_facts_stand_at_their_depths_and_all_else_is_filler(source):
    _, tokenizer = source
    facts, tokens = make_facts(3, seed=0), filler(tokenizer)
    ids, depths = plant(tokenizer, tokens, facts, 1000)
    assert len(ids) == 1000 and depths == [0.0, 0.5, 1.0]
    text = tokenizer.decode(ids)
    places = [text.index(fact.statement) for fact in facts]
    assert places[0] == 1 and places == sorted(places) and text.endswith(f"{facts[2].statement} ")
    without = text
    for fact in facts:
        without = without.replace(f" {fact.statement} ", "")
    assert without == tokenizer.decode(tokens[: len(without)])
    for length, words in ((20, "too few for 3 facts"), (10**6, "too few to plant facts into 1,000,000")):
        with pytest.raises(InputError, match=words):
            plant(tokenizer, tokens, facts, length)


class Numbers:
    """A tokenizer for a model that knows no language: its texts are token ids."""

    def encode(self, text: str) -> list[int]:
        return [int(token) for token in text.split()]


@pytest.mark.parametrize("attention", [None, "tra", "hybrid"])
def test_an_answer_counts_if_the_model_would_write_it(attention, source, monkeypatch):
    """The tiny model knows nothing, so it is asked for what it says anyway, and for something else."""
    monkeypatch.setattr("traformer.evaluation.recall_at_depth.CHUNK", 64)
    model, tokenizer = source
    if attention == "hybrid":
        model = traformer.convert(model, ["rope", "tra"], rope={"sliding_window": 16, "sinks": 2}).eval()
    elif attention is not None:
        model = traformer.convert(model, attention).eval()
    ids = filler(tokenizer)[:300].tolist()
    right, wrong = [], []
    for question in ("5 7 91 14", "33"):
        whole = torch.tensor([[*ids, *Numbers().encode(question)]])
        for _ in range(4):  # what it would write
            whole = torch.cat((whole, model(whole).logits[:, -1:].argmax(-1)), dim=1)
        written = whole[0, -4:].tolist()
        right.append(Fact("sentence", "", question, " ".join(map(str, written))))
        other = [*written[:-1], (written[-1] + 1) % 200]
        wrong.append(Fact("sentence", "", question, " ".join(map(str, other))))
    reading = ask(model, Numbers(), ids, [*right, *wrong, right[0]], [0.0, 0.5, 0.5, 0.5, 1.0])
    assert [one.is_right for one in reading.recalls] == [True, True, False, False, True]
    assert [one.depth for one in reading.recalls] == [0.0, 0.5, 0.5, 0.5, 1.0]
    assert reading.prefill_tokens == 300 and reading.decode_tokens == 3 * 7 + 2 * 4
    assert reading.prefill_seconds > 0 and reading.decode_seconds > 0


@torch.no_grad()
def test_reading_in_chunks_is_reading_at_once(source):
    model, _ = source
    ids = torch.randint(1, 200, (1, 50), generator=torch.Generator().manual_seed(0))
    cache = prefill(model, ids[0, :-1].tolist(), chunk=7)
    last = model(ids[:, -1:], past_key_values=cache).logits
    torch.testing.assert_close(last[:, -1], model(ids).logits[:, -1], rtol=1e-4, atol=1e-4)
