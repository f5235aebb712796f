"""Why a model fails beyond its training length: two failures, measured in its attention maps as length grows.

Residue: weight on keys that the task makes irrelevant. For every scored answer the task names its source, the
position that decides it; at the query that predicts the answer, every key but the task's deciding ones is irrelevant
(in flip_flop the source is the last written bit, and the `w` before it counts as relevant too).

Positional up-weighting: position lifts a key whose content speaks against it above one whose content speaks for it.
The content score is q.k before any position is written into q, k or the logits. Of all pairs of a key with a negative
and a key with a positive content score, how many have the negative one weigh more (the rate), and by how many nats
(the log ratio)? By distance of the lifted key, since distances beyond the training length are those that no position
embedding has met. Where position is in the embeddings (sinusoidal, learned) content and position cannot be told
apart, and the rate is 0, as for NoPE.

Beside them is what a head does to get there: `marks`, its weight on the key just before the source when the source
itself is the query (in copy, induction and flip_flop the source is found by what precedes it, so a head of a
lower layer has to note that); `positive`, the share of keys with a positive content score, which is what TRA keeps at
threshold 0; and `decay`, the factor that TRA's gate leaves of a weight for each kept key between, mean over the
queries. Of several checkpoints of a run they show which head forms, and when.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from traformer.devices import flush_denormals
from traformer.errors import InputError
from traformer.evaluation.opened import OpenedRun
from traformer.evaluation.watcher import Watcher
from traformer.models import memory
from traformer.models.observe import Attended, observe
from traformer.runs.checkpoint import all_checkpoints
from traformer.runs.folder import RunFolder
from traformer.runs.measurements import Job, Measurement, Request, as_length, measure_missing
from traformer.tasks.base import Batch, Split, Task
from traformer.tasks.tokens import NO_SOURCE

STUDY = "diagnosis"
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
    again: bool = False,
    watcher: Watcher | None = None,
) -> list[Measurement]:
    """Both failures for each length: `examples` sequences, at most `queries` answers of each; stored in the run.

    The first split of each length is used (flip_flop: iid). Sequences go through the model one at a time. `steps` names
    checkpoints, as "500", "100,200" or "all"; None: the newest.
    """
    for name, value in (("examples", examples), ("queries", queries)):
        if value < 1:
            raise InputError(f"{name} is {value}; give a whole number above zero")
    watcher = watcher or Watcher()
    found: list[Measurement] = []
    for wanted in _steps(path, steps):
        run = OpenedRun.open(path, device, wanted, watcher)
        if not run.weighs_keys:
            raise InputError(
                f"attention {run.config.attention!r} weighs no keys, so there is nothing to diagnose in {path}"
            )
        splits = _first_splits(run.task.test_splits(lengths))
        for split in splits:
            check_memory(run, split)
        protocol = {"queries": queries, "train_tokens": run.task.sequence_length}
        seed = run.config.seed
        jobs = [
            Job(
                Request(split.name, as_length(split.length), run.step, examples, seed, STUDY, protocol),
                run.folder.results,
                split,
            )
            for split in splits
        ]

        def measure_split(job: Job[Split], run: OpenedRun = run) -> list[Measurement]:
            watcher.say(f"{path}: step {run.step}, length {job.subject.length}")
            totals = measure(run.model, job.subject, examples, queries, Task.test_seed(run.config.seed))
            return list(_measurements(run, job.request, totals))

        for _, measured in measure_missing(jobs, measure_split, again=again):
            found += measured
    return found


def check_memory(run: OpenedRun, split: Split) -> None:
    """Whole attention maps are looked at: weights, scores and two of their like on the way, [H, T, T] each."""
    length = split.task.sequence_length
    maps = 4 * memory.FLOAT * run.model.config.num_attention_heads * length * length
    memory.check_fits(
        memory.memory_need(run.model.config, length, training=False, on_cpu=run.device.type == "cpu").total(1) + maps,
        memory.available_memory(run.device),
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
    place_of = {layer: place for place, layer in enumerate(layers)}
    totals = _HeadTotals((len(layers), layers[0].num_heads))
    for index in range(examples):
        batch = split.task.examples(seed=seed, start=index, count=1).to(device)
        places, sources = _queries(batch, queries)
        if not len(places):
            continue
        totals.queries += len(places)
        relevant = _relevant(split.task, batch, sources)

        def add(
            seen: Attended, places: Tensor = places, sources: Tensor = sources, relevant: Tensor = relevant
        ) -> None:
            assert seen.weights is not None
            layer, whole = place_of[seen.layer], seen.weights[0]  # [H, T, T]
            weights, scores = whole[:, places].float(), seen.content_scores(places)[0].float()  # [H, R, T]
            _add_residue(totals, layer, weights, relevant)
            _add_lifted(totals, layer, weights, scores, places)
            before_source = whole[:, sources, (sources - 1).clamp(min=0)]  # the source's weight on the key before it
            totals.marks[layer] += before_source.double().sum(-1).cpu()
            totals.positive[layer] += _positive_share(scores, places).sum(-1).cpu()
            totals.decay[layer] += _decay(seen)[:, places].double().sum(-1).cpu()

        with observe(model, weights=True, visit=add):
            model.base_model(input_ids=batch.input_ids, use_cache=False)  # type: ignore[operator]
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
    return relevant.scatter(1, task.deciding_keys(sources).clamp(min=0), True)


def _decay(seen: Attended) -> Tensor:
    """What the gate of each token leaves of a weight, [H, T]; NaN for attention without a learned gate."""
    decay = seen.log_decay()
    if decay is None:
        return seen.hidden_states.new_full((seen.q.shape[1], seen.q.shape[2]), torch.nan)
    return decay[0].float().exp()


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


def _measurements(run: OpenedRun, request: Request, totals: _HeadTotals) -> Iterator[Measurement]:
    """Every head's numbers; then over all heads the lifted pairs, as a whole and by distance."""
    layers, heads = totals.shape
    for layer in range(layers):
        for head in range(heads):
            at = {"layer": layer, "head": head}
            for metric, sums in (
                ("residue", totals.residue), ("source_weight", totals.source), ("marks", totals.marks),
                ("positive_keys", totals.positive), ("gate_decay", totals.decay),
            ):  # fmt: skip
                mean = float(sums[layer, head]) / totals.queries
                if not math.isnan(mean):
                    yield run.measurement(request, metric, mean, at=at, counted=totals.queries)
            of_head = (totals.pairs[layer, head], totals.lifted[layer, head], totals.log_ratio[layer, head])
            yield from _lifted(run, request, "lifted_pairs", map(float, of_head), at)
    whole = (float(sums.sum()) for sums in (totals.pairs, totals.lifted, totals.log_ratio))
    yield from _lifted(run, request, "lifted_pairs", whole, {})
    for number, of_distance in sorted(totals.by_distance.items()):
        yield from _lifted(
            run, request, "lifted_by_distance", of_distance, {"distance": 2**number, "to": 2 ** (number + 1) - 1}
        )


def _lifted(
    run: OpenedRun, request: Request, metric: str, sums: Iterable[float], at: dict[str, int]
) -> Iterator[Measurement]:
    """The share of lifted pairs and, but for distances, by how many nats; `sums`: pairs, lifted, log ratio."""
    pairs, lifted, log_ratio = sums
    yield run.measurement(request, metric, lifted / pairs if pairs else 0.0, at=at, counted=int(pairs))
    if "distance" not in at:
        nats = log_ratio / lifted if lifted else 0.0
        yield run.measurement(request, "lift_in_nats", nats, at=at, counted=int(lifted))
