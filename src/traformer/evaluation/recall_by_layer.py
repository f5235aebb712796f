"""Which layers of a trained decoder recall: what becomes of planted facts if one layer alone sees only near keys.

Most layers of a language model look at what is near. Cut to a window, they lose nothing; the few that fetch what was
said long ago lose it all. To give a model a longer reach, these are the layers to convert, and the others can keep a
sliding window. Facts are planted as in recall_at_depth. All questions are asked in one pass: each follows the text
directly, and sees the text and itself but no other question.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from traformer.data.tokenizers import TextTokenizer
from traformer.errors import InputError
from traformer.evaluation.recall_at_depth import Fact, make_facts, plant
from traformer.models.conversion.configs import CONFIGS


@dataclass(frozen=True)
class Recalled:
    """What a model knew of the planted facts."""

    share: float  # of the facts, every token of the answer the likeliest
    log_probability: float  # of an answer's token, mean


@dataclass(frozen=True)
class RecallByLayer:
    """The recall of a decoder, whole and with windows."""

    whole: Recalled  # every layer sees everything
    windowed: Recalled  # no layer does
    without: list[Recalled]  # layer by layer: all do but this one
    chosen: list[int]  # the layers that cost most, in order of depth
    only_chosen: Recalled  # these do, and no other

    def pattern(self, new: str, old: str = "rope") -> str:
        """What `tra convert --attention` takes to make the chosen layers `new` and leave the others `old`."""
        return ",".join(new if layer in self.chosen else old for layer in range(len(self.without)))


@dataclass(frozen=True)
class _Asked:
    """A text with its questions as one row of N tokens."""

    tokens: Tensor  # [1, N]
    positions: Tensor  # [1, N]: a question's follow those of the text
    visible: Tensor  # [N, N] bool
    answers: list[tuple[list[int], list[int]]]  # for each fact the places that predict its answer, and the answer


def recall_by_layer(
    model: Any,
    tokenizer: TextTokenizer,
    text: NDArray[Any],
    *,
    count: int | None = None,
    length: int = 1024,
    window: int = 128,
    sinks: int = 4,
    facts: int = 8,
    texts: int = 3,
    progress: Callable[[str, int, int], None] = lambda title, done, total: None,
) -> RecallByLayer:
    """Measure a decoder of a convertible family on facts planted into `texts` parts of a text, `length` tokens each.

    count     layers to choose; by default a quarter of them, rounded up
    window    what a layer sees when it does not see everything: so many keys, and the first `sinks`
    progress  called with a title, the passes done and all passes
    """
    layers = _attention_modules(model)
    count = -(-len(layers) // 4) if count is None else count
    if not 1 <= count <= len(layers):
        raise InputError(f"the number of layers to choose must lie between 1 and {len(layers)}, not {count}")
    if not 0 < window < length:
        raise InputError(f"the window must be shorter than the text of {length} tokens, not {window}")
    step = (len(text) - length) // max(1, texts - 1)
    if step < length and texts > 1:
        raise InputError(f"{texts} texts of {length:,} tokens need a longer text than {len(text):,} tokens")
    asked = []
    for number in range(texts):
        planted = make_facts(facts, seed=number)
        ids, _ = plant(tokenizer, text[number * step : number * step + length], planted, length)
        asked.append(_with_questions(ids, planted, tokenizer))
    longest, limit = max(one.positions.max().item() + 1 for one in asked), model.config.max_position_embeddings
    if longest > limit and not hasattr(model.base_model, "rotary_emb"):
        raise InputError(f"{type(model).__name__} has {limit:,} positions; give a text shorter than {length:,} tokens")
    total, done = len(layers) + 3, 0

    def recall(title: str, whole: Collection[int]) -> Recalled:
        nonlocal done
        progress(title, done, total)
        done += 1
        return _recall(model, layers, asked, whole, window, sinks)

    everything = set(range(len(layers)))
    whole = recall("every layer whole", everything)
    windowed = recall("windows in every layer", ())
    without = [recall(f"a window in layer {layer}", everything - {layer}) for layer in range(len(layers))]
    costliest = sorted(everything, key=lambda layer: without[layer].log_probability)[:count]
    only_chosen = recall("windows in all but the chosen", costliest)
    progress("done", total, total)
    return RecallByLayer(whole, windowed, without, sorted(costliest), only_chosen)


def _attention_modules(model: Any) -> list[Any]:
    family = CONFIGS.get(model.config.model_type)
    if family is None:
        raise InputError(f"{type(model).__name__} is of no family that can be converted. Known: {', '.join(CONFIGS)}")
    names = family.trunk_names
    return [getattr(block, names["attention_name"]) for block in getattr(model.base_model, names["blocks_name"])]


def _with_questions(ids: Sequence[int], facts: Sequence[Fact], tokenizer: TextTokenizer) -> _Asked:
    tokens, positions = list(ids), list(range(len(ids)))
    segment = [0] * len(ids)  # 0: the text; a question sees this and its own
    answers = []
    for number, fact in enumerate(facts, start=1):
        question, answer = tokenizer.encode(f"\n{fact.question}"), tokenizer.encode(fact.answer)
        first = len(tokens) + len(question) - 1  # what follows the question's last token is the answer
        answers.append((list(range(first, first + len(answer))), answer))
        asked = [*question, *answer[:-1]]
        tokens += asked
        positions += range(len(ids), len(ids) + len(asked))
        segment += [number] * len(asked)
    owner = torch.tensor(segment)
    visible = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
    visible &= (owner[None, :] == 0) | (owner[None, :] == owner[:, None])
    return _Asked(torch.tensor([tokens]), torch.tensor([positions]), visible, answers)


@torch.inference_mode()
def _recall(
    model: Any, layers: Sequence[Any], asked: Sequence[_Asked], whole: Collection[int], window: int, sinks: int
) -> Recalled:
    right, log_probabilities = [], []
    for one in asked:
        places = one.positions[0]
        near = (places[:, None] - places[None, :] < window) | (places < sinks)[None, :]
        masks = [_additive(one.visible if layer in whole else one.visible & near) for layer in range(len(layers))]
        with _masks(layers, masks):
            hidden = model.base_model(
                input_ids=one.tokens, position_ids=one.positions, use_cache=False
            ).last_hidden_state[0]
        for rows, answer in one.answers:
            predicted = model.get_output_embeddings()(hidden[rows]).float().log_softmax(-1)
            right.append(predicted.argmax(-1).tolist() == answer)
            log_probabilities += predicted[range(len(answer)), answer].tolist()
    return Recalled(sum(right) / len(right), sum(log_probabilities) / len(log_probabilities))


def _additive(visible: Tensor) -> Tensor:
    """[1, 1, N, N], as every implementation of attention takes it."""
    return torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)[None, None]


@contextmanager
def _masks(layers: Sequence[Any], masks: Sequence[Tensor]) -> Iterator[None]:
    """Give each attention module a mask of its own, in place of the one that the model makes for all."""

    def replaced(mask: Tensor) -> Callable[..., Any]:
        return lambda module, given, named: (given, {**named, "attention_mask": mask})

    handles = [
        layer.register_forward_pre_hook(replaced(mask), with_kwargs=True)
        for layer, mask in zip(layers, masks, strict=True)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
