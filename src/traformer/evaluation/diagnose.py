"""Why a model fails beyond its training length: two failures, measured in its attention maps as length grows.

Residue: weight on keys that the task makes irrelevant. For every scored answer the task names its source, the
position that decides it; at the query that predicts the answer, every other key is irrelevant (in flip_flop the
source is the last written bit, and the `w` before it counts as relevant too).

Positional up-weighting: position lifts a key whose content speaks against it above one whose content speaks for it.
The content score is q.k before any position is written into q, k or the logits. Of all pairs of a key with a negative
and a key with a positive content score, how many have the negative one weigh more (the rate), and by how many nats
(the log ratio)? By distance of the lifted key, since distances beyond the training length are those that no position
embedding has met. Where position stands in the embeddings (sinusoidal, learned) content and position cannot be told
apart, and the rate is 0, as for NoPE.

Beside them stands what a head does to get there: `marks`, its weight on the key just before the source when the source
itself is the query (in copy, induction and flip_flop the source is found by what stands before it, so a head of a
lower layer has to note that); `positive`, the share of keys with a positive content score, which is what TRA keeps at
threshold 0; and `decay`, the factor that TRA's gate leaves of a weight for each kept key between, mean over the
queries. Of several checkpoints of a run they show which head forms, and when.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from traformer.devices import flush_denormals
from traformer.errors import InputError
from traformer.evaluation.watcher import Watcher
from traformer.layers import AttentionLayer
from traformer.methods import resolve_method
from traformer.models import memory
from traformer.models.from_run import load_run
from traformer.ops.eager import content_scores
from traformer.runs.checkpoint import all_checkpoints
from traformer.runs.folder import RunFolder
from traformer.tasks.base import NO_SOURCE, Batch, Split, Task

Row = dict[str, Any]
_LEAST_WEIGHT = 1e-30  # what a weight counts as at least, so that it has a logarithm


@dataclass
class _HeadTotals:
    """Sums over queries, each [layers, heads]; the distance sums [bins] are over all heads."""

    shape: tuple[int, int]
    queries: int = 0
    source: Tensor = field(init=False)
    residue: Tensor = field(init=False)
    marks: Tensor = field(init=False)
    positive: Tensor = field(init=False)
    decay: Tensor = field(init=False)  # NaN for attention without a gate
    pairs: Tensor = field(init=False)
    lifted: Tensor = field(init=False)
    log_ratio: Tensor = field(init=False)
    by_distance: dict[int, list[float]] = field(default_factory=dict)  # bin -> pairs, lifted, log ratio

    def __post_init__(self) -> None:
        for name in ("source", "residue", "marks", "positive", "decay", "pairs", "lifted", "log_ratio"):
            setattr(self, name, torch.zeros(self.shape, dtype=torch.float64))


def diagnose_run(
    path: str | Path,
    lengths: str | Iterable[int | str] | None = None,
    examples: int = 8,
    queries: int = 32,
    *,
    steps: str | None = None,
    device: str = "auto",
    watcher: Watcher | None = None,
) -> list[Row]:
    """Rows of both failures for each length: `examples` sequences, at most `queries` answers of each.

    The first split of each length is used (flip_flop: iid). Sequences go through the model one at a time. `steps` names
    checkpoints, as "500", "100,200" or "all"; None: the newest.
    """
    for name, value in (("examples", examples), ("queries", queries)):
        if value < 1:
            raise InputError(f"{name} is {value}; give a whole number above zero")
    watcher = watcher or Watcher()
    rows: list[Row] = []
    for wanted in _steps(path, steps):
        model, task, config, step = load_run(path, device=device, step=wanted, warn=watcher.say)
        if not resolve_method(config.attention, config.attention_options).has_weights:
            raise InputError(
                f"attention {config.attention!r} weighs no keys, so there is nothing to diagnose in {path}"
            )
        splits = _first_splits(task.test_splits(lengths))
        for split in splits:
            _check_memory(model, split)
        for split in splits:
            watcher.say(f"{path}: step {step}, length {split.length}")
            totals = measure(model, split, examples, queries, Task.test_seed(config.seed))
            common = {
                "run": str(path),
                "task": config.task,
                "attention": config.attention,
                "seed": config.seed,
                "step": step,
                "train_length": task.length_range[1],
                "train_tokens": task.sequence_length,
                "length": split.size,
                "queries": totals.queries,
            }
            rows += [{**common, **row} for row in _rows(totals, task.sequence_length)]
    _mark_reading_head(rows)
    return rows


def _check_memory(model: Any, split: Split) -> None:
    """Whole attention maps are looked at: weights, scores and two of their like on the way, [H, T, T] each."""
    length = split.task.sequence_length
    maps = 4 * memory.FLOAT * model.config.num_attention_heads * length * length
    memory.check_fits(
        memory.memory_need(model.config, length, training=False).total(1) + maps,
        memory.available_memory(model.device),
        f"diagnosing a sequence of {length} tokens, whose attention maps are looked at whole,",
        "leave that length out of --lengths",
    )


def _steps(path: str | Path, steps: str | None) -> Sequence[int | None]:
    """The checkpoints that `steps` names, in order; None: the newest."""
    if steps is None:
        return [None]
    if steps == "all":
        return [found.step for found in all_checkpoints(RunFolder.open(path).checkpoints)] or [None]
    try:
        return sorted({int(step) for step in steps.split(",")})
    except ValueError:
        raise InputError(
            f'steps {steps!r} are not "all" or whole numbers with commas between, such as 100,200'
        ) from None


def _first_splits(splits: list[Split]) -> list[Split]:
    first: dict[str, Split] = {}
    for split in splits:
        first.setdefault(split.length, split)
    return sorted(first.values(), key=lambda split: split.size)


@flush_denormals()
@torch.inference_mode()
def measure(model: nn.Module, split: Split, examples: int, queries: int, seed: int) -> _HeadTotals:
    """Both failures on the first `examples` sequences of a split."""
    device = next(model.parameters()).device
    layers = [block.self_attn for block in model.model.layers]  # type: ignore[union-attr]
    totals = _HeadTotals((len(layers), layers[0].num_heads))
    for index in range(examples):
        batch = split.task.examples(seed=seed, start=index, count=1).to(device)
        places, sources = _queries(batch, queries)
        if not len(places):
            continue
        totals.queries += len(places)
        relevant = _relevant(split.task, batch, sources)
        for layer_index, seen in enumerate(_maps(model, layers, batch, places, sources)):
            _add_residue(totals, layer_index, seen.weights, relevant)
            _add_lifted(totals, layer_index, seen.weights, seen.scores, places)
            totals.marks[layer_index] += seen.before_source.double().sum(-1).cpu()
            totals.positive[layer_index] += _positive_share(seen.scores, places).sum(-1).cpu()
            totals.decay[layer_index] += seen.decay.double().sum(-1).cpu()
    if totals.queries == 0:
        raise InputError(f"task {split.task.name!r} names no source for its answers, so nothing can be diagnosed")
    return totals


def _queries(batch: Batch, most: int) -> tuple[Tensor, Tensor]:
    """Positions [R] that predict an answer with a source, spread evenly over the sequence, and their sources [R]."""
    answers = ((batch.sources[0] != NO_SOURCE) & batch.answers[0]).nonzero()[:, 0]
    answers = answers[batch.sources[0, answers] < answers]
    if len(answers) > most:
        chosen = torch.linspace(0, len(answers) - 1, most, device=answers.device).round().long()
        answers = answers[chosen]
    return answers - 1, batch.sources[0, answers]


def _relevant(task: Task, batch: Batch, sources: Tensor) -> Tensor:
    """bool [R, T]: keys that the task makes relevant."""
    relevant = torch.zeros(len(sources), batch.input_ids.shape[1], dtype=torch.bool, device=sources.device)
    relevant[torch.arange(len(sources)), sources] = True
    if task.name == "flip_flop":
        relevant[torch.arange(len(sources)), sources - 1] = True
    return relevant


@dataclass
class _Seen:
    """What one layer did in one sequence, at R queries."""

    weights: Tensor  # [H, R, T]
    scores: Tensor  # [H, R, T], by content alone
    before_source: Tensor  # [H, R]: the source's weight on the key before it
    decay: Tensor  # [H, R]


def _maps(model: nn.Module, layers: list[AttentionLayer], batch: Batch, places: Tensor, sources: Tensor) -> list[_Seen]:
    """What each layer did at the queries `places`, whose sources are `sources`."""
    found: list[_Seen] = []

    def keep_rows(layer: AttentionLayer, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> Any:
        q, k, _ = layer.project(inputs[0])
        scores = content_scores(q[:, :, places], k, layer.scale)[0]
        weights = output[1][0]  # [H, T, T]
        found.append(
            _Seen(
                weights=weights[:, places].float(),
                scores=scores.float(),
                before_source=weights[:, sources, (sources - 1).clamp(min=0)].float(),
                decay=_decay(layer, inputs[0], len(scores))[:, places],
            )
        )
        return output[0], None  # the whole map is not needed any more

    hooks = [layer.register_forward_hook(keep_rows) for layer in layers]
    try:
        model.base_model(input_ids=batch.input_ids, output_attentions=True, use_cache=False)  # type: ignore[operator]
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _decay(layer: AttentionLayer, hidden_states: Tensor, heads: int) -> Tensor:
    """What the gate of each token leaves of a weight, [H, T]; NaN for attention without a learned gate."""
    if getattr(layer, "decay_proj", None) is None:
        return hidden_states.new_full((heads, hidden_states.shape[1]), torch.nan)
    return layer.log_decay(hidden_states)[0].float().exp()  # type: ignore[operator]


def _positive_share(scores: Tensor, places: Tensor) -> Tensor:
    """Share of the keys up to each query that score above 0, [H, R]."""
    visible = torch.arange(scores.shape[-1], device=scores.device)[None, :] <= places[:, None]  # [R, T]
    return (visible & (scores > 0)).sum(-1).double() / visible.sum(-1)


def _add_residue(totals: _HeadTotals, layer: int, weights: Tensor, relevant: Tensor) -> None:
    mass = weights.abs().double()  # differential attention has negative weights
    on_source = (mass * relevant).sum(-1)  # [H, R]
    totals.source[layer] += on_source.sum(-1).cpu()
    totals.residue[layer] += (mass.sum(-1) - on_source).sum(-1).cpu()


def _add_lifted(totals: _HeadTotals, layer: int, weights: Tensor, scores: Tensor, places: Tensor) -> None:
    length = weights.shape[-1]
    keys = torch.arange(length, device=weights.device)
    visible = keys[None, :] <= places[:, None]  # [R, T]
    log_weights = weights.clamp(min=_LEAST_WEIGHT).log().double()
    positive, negative = visible & (scores > 0), visible & (scores < 0)
    # For each negative key: how many positive ones weigh less, and the sum of their log weights.
    ranked = torch.where(positive, log_weights, torch.inf).sort(-1).values  # [H, R, T]
    below = torch.searchsorted(ranked, log_weights)
    running = torch.nn.functional.pad(torch.where(ranked.isfinite(), ranked, 0.0).cumsum(-1), (1, 0))
    gain = below * log_weights - running.gather(-1, below)
    lifted, gain = below * negative, gain * negative
    pairs = negative * positive.sum(-1, keepdim=True)
    for name, values in (("pairs", pairs), ("lifted", lifted), ("log_ratio", gain)):
        getattr(totals, name)[layer] += values.double().sum((-2, -1)).cpu()
    # Distances in powers of two: bin b holds 2^b .. 2^(b+1) - 1 (the own key counts with distance 1).
    bins = (places[:, None] - keys[None, :]).clamp(min=1).double().log2().floor().long()
    for number in bins[visible].unique().tolist():
        here = visible & (bins == number)
        sums = [float((values * here).sum()) for values in (pairs, lifted, gain)]
        before = totals.by_distance.get(number, [0.0, 0.0, 0.0])
        totals.by_distance[number] = [a + b for a, b in zip(before, sums, strict=True)]


def _rows(totals: _HeadTotals, train_tokens: int) -> Iterable[Row]:
    layers, heads = totals.shape
    for layer in range(layers):
        for head in range(heads):
            pairs, lifted = float(totals.pairs[layer, head]), float(totals.lifted[layer, head])
            yield {
                "kind": "head",
                "layer": layer,
                "head": head,
                "residue": float(totals.residue[layer, head]) / totals.queries,
                "source": float(totals.source[layer, head]) / totals.queries,
                "marks": float(totals.marks[layer, head]) / totals.queries,
                "positive": float(totals.positive[layer, head]) / totals.queries,
                "decay": _number(float(totals.decay[layer, head]) / totals.queries),
                "lifted": lifted / pairs if pairs else 0.0,
                "log_ratio": float(totals.log_ratio[layer, head]) / lifted if lifted else 0.0,
                "pairs": int(pairs),
            }
    for number, (pairs, lifted, gain) in sorted(totals.by_distance.items()):
        yield {
            "kind": "distance",
            "from": 2**number,
            "to": 2 ** (number + 1) - 1,
            "in_trained_range": 2**number < train_tokens,
            "lifted": lifted / pairs if pairs else 0.0,
            "log_ratio": gain / lifted if lifted else 0.0,
            "pairs": int(pairs),
        }


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def _mark_reading_head(rows: list[Row]) -> None:
    """Names two heads of a run, by the newest step at the shortest length, and follows them through all others.

    reads: looks at the source most, so that its residue decides the answer. marks_most: when the source is the query,
    looks at the key before it most, among the layers below the reading head (if there is one).
    """
    heads = [row for row in rows if row["kind"] == "head"]
    newest, shortest = max(row["step"] for row in heads), min(row["length"] for row in heads)
    here = [row for row in heads if (row["step"], row["length"]) == (newest, shortest)]
    best = max(here, key=lambda row: row["source"])
    below = [row for row in here if row["layer"] < best["layer"]] or here
    marking = max(below, key=lambda row: row["marks"])
    for row in heads:
        place = (row["layer"], row["head"])
        row["reads"] = place == (best["layer"], best["head"])
        row["marks_most"] = place == (marking["layer"], marking["head"])


def summary(rows: list[Row]) -> list[Row]:
    """One row for each run, step and length: the reading and the marking head, and up-weighting over all heads."""
    groups: dict[tuple[str, int, int], list[Row]] = {}
    for row in rows:
        if row["kind"] == "head":
            groups.setdefault((row["run"], row["step"], row["length"]), []).append(row)
    result = []
    for (run, _, length), heads in groups.items():
        reading = next(row for row in heads if row["reads"])
        marking = next(row for row in heads if row["marks_most"])
        pairs = sum(row["pairs"] for row in heads)
        lifted = sum(row["lifted"] * row["pairs"] for row in heads)
        gain = sum(row["log_ratio"] * row["lifted"] * row["pairs"] for row in heads)
        result.append(
            {
                **{key: reading[key] for key in ("task", "attention", "seed", "step", "train_length", "queries")},
                "run": run,
                "length": length,
                "reading_head": f"{reading['layer']}.{reading['head']}",
                "residue": reading["residue"],
                "source": reading["source"],
                "positive": reading["positive"],
                "decay": reading["decay"],
                "marking_head": f"{marking['layer']}.{marking['head']}",
                "marks": marking["marks"],
                "marking_positive": marking["positive"],
                "marking_decay": marking["decay"],
                "mean_residue": math.fsum(row["residue"] for row in heads) / len(heads),
                "lifted": lifted / pairs if pairs else 0.0,
                "log_ratio": gain / lifted if lifted else 0.0,
            }
        )
    return result
