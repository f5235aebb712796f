"""Looks inside models: their attention on a prompt, on an example that grows, or on token ids, as an Exploration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from traformer.devices import flush_denormals
from traformer.errors import InputError, unknown_name
from traformer.evaluation.exploration import Answer, Exploration, Growth, LayerTrace, RunView, encode_view
from traformer.evaluation.opened import OpenedRun
from traformer.evaluation.watcher import Watcher
from traformer.layers import AttentionLayer
from traformer.methods import METHODS, Method, StackConfig, label_of, stack_of
from traformer.models.checks import check_ids
from traformer.models.memory import available_memory, check_fits
from traformer.models.observe import Attended, observe
from traformer.runs.folder import RunFolder
from traformer.tasks.base import Split, Task
from traformer.tasks.growing import grow

MOST_BYTES = 4_000_000  # of a whole exploration
INLINE_BYTES = 1_000_000  # of one that a notebook holds
MOST_SEQUENCES = 16  # of a length, to measure how weights and answers change as inputs grow
MOST_CELLS = 1 << 24  # of their maps, for a head: long inputs are few

Decode = Callable[[list[int]], str]  # token ids -> text, as tokenizers and tasks have it


@dataclass(frozen=True)
class _Sequence:
    """One input, with its answers where the task says what they are."""

    length: str
    ids: list[int]
    answers: list[tuple[int, int]]  # place and true token
    sources: dict[int, list[int]]  # query -> the keys that decide what it predicts
    grown_at: int = 0  # where irrelevant tokens were put in; answers before them say nothing about growth


@dataclass(frozen=True)
class _Subject:
    """A model to look into, and what the page says about it."""

    model: Any
    label: str
    summary: str
    decode: Decode
    encode: Callable[[str], list[int]]
    run: OpenedRun | None = None  # None: a saved model, which has no task

    @property
    def trained(self) -> int:
        """Tokens of the longest training sequence; 0: not known."""
        return 0 if self.run is None else self.run.task.sequence_length


@flush_denormals()
def explore_runs(
    paths: Sequence[str | Path],
    *,
    prompt: str | None = None,
    example: int = 0,
    lengths: str | None = None,
    split: str | None = None,
    title: str | None = None,
    device: str = "auto",
    step: int | None = None,
    most_bytes: int = MOST_BYTES,
    watcher: Watcher | None = None,
) -> Exploration:
    """Attention of runs of one task, on a prompt or on test example `example` at growing lengths.

    A path may also be the folder of a saved model, such as `tra convert` writes; it has no task, so it needs a prompt.
    `lengths` are as for `tra eval`; by default 1, 2, 4 and 8 times the training length. `split` is the task's split, by
    default its first. Where the task knows what is irrelevant, the longer inputs are the shortest one with more of it
    (flip_flop, induction, recall in text); otherwise they are other examples.
    """
    watcher = watcher or Watcher()
    subjects = [_open(path, device, step, watcher) for path in paths]
    for path, subject in zip(paths, subjects, strict=True):
        if prompt is None and subject.run is None:
            raise InputError(f"{path} is a saved model without a task; give a --prompt")
    groups = [[_prompted(paths, subjects, prompt)]] if prompt is not None else []
    if prompt is None:
        opened = [subject.run for subject in subjects if subject.run is not None]
        for path, run in zip(paths, opened, strict=True):
            if run.task.token_names != opened[0].task.token_names:
                raise InputError(f"{path} has other tokens than {paths[0]}; explore runs of one task together")
        groups = _examples(opened[0], example, lengths, split)
    room = most_bytes // (len(paths) * len(groups))
    runs = []
    for path, subject in zip(paths, subjects, strict=True):
        watcher.say(f"{path}: {len(groups)} {'length' if len(groups) == 1 else 'lengths'}")
        runs.append(_look(subject.model, groups, subject.label, subject.summary, subject.trained, room))
    if title is None:
        first = subjects[0].run
        title = f"Inside {' and '.join(dict.fromkeys(run.label for run in runs))}"
        title += f": {first.task.label}" if first is not None else ""
    return Exploration(
        title, runs, _vocabulary(runs, subjects[0].decode), len(groups) > 1 and groups[-1][0].grown_at > 0
    )


def explore_model(
    model: Any,
    input_ids: Tensor | Sequence[int],
    *,
    decode: Decode | None = None,
    answers: Tensor | Sequence[bool] | None = None,
    title: str | None = None,
    most_bytes: int = INLINE_BYTES,
) -> Exploration:
    """Attention of one model of ours, converted ones included, on one sequence of token ids [T] or [1, T].

    decode    the text of a list of ids, such as `tokenizer.decode` or `task.decode`; without it tokens are numbers
    answers   [T] or [1, T], True where the page compares the model's prediction with the token
    """
    _check_weighs_keys(model, "this model")
    ids = _one_row(torch.as_tensor(input_ids), "input_ids")
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise InputError(f"input_ids must be whole numbers, not {ids.dtype}")
    check_ids(ids, model.config.vocab_size)
    scored: list[int] = []
    if answers is not None:
        mask = _one_row(torch.as_tensor(answers), "answers")
        if mask.shape != ids.shape:
            raise InputError(f"answers has {len(mask)} places, input_ids {len(ids)}; give one for each token")
        scored = [place for place in mask.nonzero()[:, 0].tolist() if place > 0]
    tokens = ids.tolist()
    sequence = _Sequence(str(len(tokens)), tokens, [(place, tokens[place]) for place in scored], {})
    label = _label(model.config)
    with _evaluating(model):
        run = _look(model, [[sequence]], label, f"{len(tokens):,} tokens", 0, most_bytes)
    return Exploration(title or f"Inside {label}", [run], _vocabulary([run], decode or _number))


def _number(ids: list[int]) -> str:
    return f"#{ids[0]}"


def _vocabulary(runs: Sequence[RunView], decode: Decode) -> dict[int, str]:
    """The text of every token that occurs or is predicted."""
    used = {token for run in runs for view in run.views for token in view.tokens}
    used |= {answer.predicted for run in runs for view in run.views for answer in view.answers}
    return {token: str(decode([token])) for token in sorted(used)}


# What to look at ----------------------------------------------------------------------------------------------------


def _open(path: str | Path, device: str, step: int | None, watcher: Watcher) -> _Subject:
    """A run folder, or the folder of a saved model with its tokenizer."""
    if (Path(path) / "config.json").is_file() and not RunFolder(path).is_run():
        return _open_saved(path, device, step)
    run = OpenedRun.open(path, device, step, watcher)
    _check_weighs_keys(run.model, str(path))
    task, trained = run.task, run.task.sequence_length
    summary = f"{task.label}, {run.step:,} steps, seed {run.config.seed}, trained to {trained:,} tokens"
    return _Subject(run.model, label_of(run.config.attention), summary, task.decode, task.encode, run)


def _open_saved(path: str | Path, device: str, step: int | None) -> _Subject:
    from traformer.devices import choose_device
    from traformer.models.sources import load_source

    if step is not None:
        raise InputError(f"{path} is a saved model, not a run, so it has no checkpoints; leave --step out")
    model, tokenizer = load_source(str(path))
    if tokenizer is None:
        raise InputError(f"{path} has no tokenizer; save one there, or call model.explore(ids) in Python")
    _check_weighs_keys(model, str(path))
    model.eval().to(choose_device(device))
    return _Subject(model, _label(model.config), f"saved model in {path}", tokenizer.decode, tokenizer.encode)


def _label(config: StackConfig) -> str:
    """The attentions of a model by the names that the catalogue has for them."""
    return " + ".join(dict.fromkeys(_named(method).label for method in stack_of(config)))


def _named(method: Method) -> Method:
    """The named configuration with these options, where there is one."""
    return next((known for known in METHODS.values() if known.is_same(method)), method)


def _check_weighs_keys(model: Any, where: str) -> None:
    if not any(isinstance(module, AttentionLayer) for module in model.modules()):
        raise InputError(f"{where} has none of our attention layers; convert it first (`tra convert`)")
    for method in stack_of(model.config):
        if not method.has_weights:
            raise InputError(f"{method.label} weighs no keys, so there is nothing to explore in {where}")


def _one_row(values: Tensor, name: str) -> Tensor:
    """[T] or [1, T] -> [T]."""
    if values.dim() == 2 and len(values) == 1:
        values = values[0]
    if values.dim() != 1 or not len(values):
        raise InputError(f"{name} must be one sequence, [length] or [1, length], not {list(values.shape)}")
    return values


def _prompted(paths: Sequence[str | Path], subjects: Sequence[_Subject], prompt: str) -> _Sequence:
    encoded = [list(subject.encode(prompt)) for subject in subjects]
    if not encoded[0]:
        raise InputError("the prompt is empty; give at least one token")
    for path, ids in zip(paths, encoded, strict=True):
        if ids != encoded[0]:
            raise InputError(f"{path} has other tokens than {paths[0]}; explore models of one vocabulary together")
    return _Sequence(str(len(encoded[0])), encoded[0], [], {})


def _examples(run: OpenedRun, example: int, lengths: str | None, split: str | None) -> list[list[_Sequence]]:
    """For each length the example that is shown, then the further ones that its growth is measured on."""
    task = run.task
    if example < 0:
        raise InputError(f"the example's number is {example}; give 0 or more")
    if lengths is None:
        lengths = ",".join(str(factor * task.length_range[1]) for factor in (1, 2, 4, 8))
    splits = task.test_splits(lengths)
    names = list(dict.fromkeys(found.name for found in splits))
    if split is not None and split not in names:
        raise unknown_name(f"split of {task.name}", split, names)
    wanted = names[0] if split is None else split
    chosen = sorted((found for found in splits if found.name == wanted), key=lambda found: found.size)
    groups = []
    for found in chosen:
        count = min(MOST_SEQUENCES, max(1, MOST_CELLS // found.task.sequence_length**2))
        seed, numbers = Task.test_seed(run.config.seed), range(example, example + count)
        groups.append([_sequence(found, chosen[0], seed, number) for number in numbers])
    return groups


def _sequence(split: Split, shortest: Split, seed: int, number: int) -> _Sequence:
    """One example of a length: the shortest, grown to it, or where that cannot be done one of its own."""
    task, place = split.task, 0
    example = task.arrays(seed, number, 1)
    if split.length.isdigit() and shortest.length.isdigit():
        first = shortest.task.arrays(seed, number, 1)
        if grown := grow(task, first, split.size - shortest.size):
            example, place = grown
    size = int(example.lengths[0])
    answers = [(at, int(example.input_ids[0, at])) for at in example.answers[0, :size].nonzero()[0].tolist() if at > 0]
    sources = {}
    for at, _ in answers:
        source = torch.from_numpy(example.sources[0, at : at + 1])
        if 0 <= int(source) < at:
            keys = task.deciding_keys(source)[0].tolist()
            sources[at - 1] = [key for key in keys if 0 <= key < at]
    return _Sequence(split.length, example.input_ids[0, :size].tolist(), answers, sources, place)


# Looking ------------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def _look(
    model: Any, groups: Sequence[Sequence[_Sequence]], label: str, summary: str, trained: int, most_bytes: int
) -> RunView:
    """One model at the first sequence of each group, a view of at most about `most_bytes`, and its growth over all."""
    views, growth = [], []
    opening: tuple[int, int] | None = None
    for sequence, *more in groups:
        _check_memory(model, len(sequence.ids))
        traces: list[LayerTrace] = []

        def visit(seen: Attended, traces: list[LayerTrace] = traces) -> None:
            assert seen.weights is not None
            gate = seen.log_decay() if counts_kept_keys(seen.layer) else None
            traces.append(LayerTrace(seen.weights[0], _first(seen.keep()), _first(gate)))

        ids = torch.tensor([sequence.ids], device=next(model.parameters()).device)
        with observe(model, weights=True, visit=visit):
            logits = model(input_ids=ids, use_cache=False).logits[0]  # [T, V]
        answers = [Answer(place, int(logits[place - 1].argmax()), truth) for place, truth in sequence.answers]
        if sequence.sources:
            on_source = _source_weights(traces, sequence.sources)  # [layers * heads, answers]
            # Of the longest input: on a short one the nearest key may decide the answer by accident.
            opening = divmod(int(on_source[:, -1].argmax()), len(traces[0].weights))
            judged = [_judge(sequence, on_source, logits), *(_judge_alone(model, other) for other in more)]
            weights, rights = (torch.cat(each) for each in zip(*judged, strict=True))
            growth.append(Growth(len(sequence.ids), float(weights.mean()), float(rights.mean()), len(judged)))
        views.append(
            encode_view(sequence.length, sequence.ids, traces, answers, sequence.sources, most_bytes=most_bytes)
        )
    layers, heads = len(views[0].layers), len(views[0].layers[0])
    return RunView(label, summary, trained, layers, heads, opening or (layers - 1, 0), views, growth)


def _judge(sequence: _Sequence, on_source: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Of each answer after the part that grows: the most weight on its deciding keys, and 1 where it is right."""
    queries = list(sequence.sources)
    after = [number for number, query in enumerate(queries) if query >= sequence.grown_at]
    rows = torch.tensor([queries[number] for number in after])
    truth = torch.tensor([sequence.ids[int(query) + 1] for query in rows])
    return on_source.amax(0)[after], (logits.cpu()[rows].argmax(-1) == truth).float()


def _judge_alone(model: Any, sequence: _Sequence) -> tuple[Tensor, Tensor]:
    """The same for a sequence that is not shown: of its maps only the rows that are needed are kept."""
    rows: list[Tensor] = []

    def visit(seen: Attended) -> None:
        assert seen.weights is not None
        of_heads = seen.weights[0].float().cpu()
        rows.append(
            torch.stack([of_heads[:, query, list(keys)].sum(-1) for query, keys in sequence.sources.items()], 1)
        )

    ids = torch.tensor([sequence.ids], device=next(model.parameters()).device)
    with observe(model, weights=True, visit=visit):
        logits = model(input_ids=ids, use_cache=False).logits[0]
    return _judge(sequence, torch.cat(rows), logits)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Every module in eval mode, and afterwards as it was."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _first(batch: Tensor | None) -> Tensor | None:
    return None if batch is None else batch[0]


def counts_kept_keys(layer: AttentionLayer) -> bool:
    """Whether the layer's gate multiplies the number of kept keys, so that it has a reach in kept keys."""
    return getattr(layer, "distance", "contextual") == "contextual"


def _source_weights(traces: Sequence[LayerTrace], sources: Mapping[int, Sequence[int]]) -> Tensor:
    """Each head's weight on the keys that decide each answer, [layers * heads, answers]."""
    return torch.stack(
        [
            torch.stack([weights[query, list(keys)].sum() for query, keys in sources.items()])
            for trace in traces
            for weights in trace.weights.float().cpu()
        ]
    )


def _check_memory(model: Any, length: int) -> None:
    """Raise the sentence if the maps of one sequence do not fit."""
    config = model.config
    need = 4 * config.num_attention_heads * length * length * (config.num_hidden_layers + 4)
    check_fits(need, available_memory(), f"looking at {length:,} tokens", "look at fewer tokens")
