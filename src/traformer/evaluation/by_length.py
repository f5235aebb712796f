"""Exact match, token accuracy and whatever else a task reports of its answers, by split and length."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from traformer.devices import flush_denormals
from traformer.errors import InputError
from traformer.evaluation.batches import batch_sizes
from traformer.evaluation.opened import EvaluationOptions, OpenedRun
from traformer.evaluation.watcher import Watcher
from traformer.runs.measurements import Job, Measurement, Request, as_length, measure_missing
from traformer.tasks.base import Batch, Split, Task
from traformer.tasks.metrics import Scores, Tally, score
from traformer.tasks.overlaps import overlap
from traformer.training.curriculum import examples_shown
from traformer.training.loss import answer_logits

# Counting the test examples that training has shown means drawing all of training again; done by itself up to this.
OVERLAP_TOKENS = 20_000_000


def evaluate_answers(run: OpenedRun, options: EvaluationOptions, watcher: Watcher) -> list[Measurement]:
    """Measure a run on its task's test splits."""
    for name in options.evaluator_options:
        raise InputError(f"{name} is for text runs; leave it out for {run.config.task}")
    seed = run.config.seed if options.seed is None else options.seed
    splits = run.task.test_splits(options.lengths)
    sizes = batch_sizes(run.model.config, splits, options.examples, options.batch_tokens, run.device)

    def request(split: Split) -> Request:
        return Request(split.name, as_length(split.length), run.step, options.examples, seed)

    def measure_split(job: Job[Split]) -> Sequence[Measurement]:
        split = job.subject
        tallies = measure(run.model, split, options.examples, Task.test_seed(seed), sizes[split], watcher.advance)
        shared = _overlap(run, split, seed, options)
        made = []
        for group, tally in tallies.items():
            for one in run.answer_measurements(job.request, split, tally, group):
                made.append(one.replace(seen_in_training=shared) if one.metric == "exact_match" else one)
        return made

    found = measure_missing(
        [Job(request(split), run.folder.results, split) for split in splits],
        measure_split,
        again=options.again,
        on_missing=lambda missing: watcher.start(
            sum(options.examples * split.task.sequence_length for split in missing)
        ),
    )
    return [one for _, measured in found for one in measured]


@flush_denormals()
@torch.inference_mode()
def measure(
    model: nn.Module,
    split: Split,
    examples: int,
    seed: int,
    batch_size: int,
    advance: Callable[[Split, int], None] = lambda split, tokens: None,
) -> dict[str, Tally]:
    """Tallies of the first `examples` examples of a stream: "" for all of them, and one for each group of the split."""
    device = next(model.parameters()).device
    tallies = {"": Tally()}
    for start in range(0, examples, batch_size):
        batch = split.task.examples(seed=seed, start=start, count=min(batch_size, examples - start)).to(device)
        scores = score(predictions(model, batch), batch)
        tallies[""].add(scores)
        if split.group is not None:
            labels = split.group(batch)
            for label in sorted(set(labels)):
                chosen = torch.tensor([other == label for other in labels], device=device)
                tallies.setdefault(label, Tally()).add(Scores(scores.correct[chosen], scores.scored[chosen]))
        advance(split, len(batch) * split.task.sequence_length)
    return tallies


def predictions(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The argmax for every answer token, [n, T]; -1 elsewhere."""
    predicted = torch.full_like(batch.input_ids, -1)
    logits = answer_logits(model, batch.input_ids, batch.answers)
    predicted[:, 1:][batch.answers[:, 1:]] = logits.argmax(-1)
    return predicted


def _overlap(run: OpenedRun, split: Split, seed: int, options: EvaluationOptions) -> float | None:
    config, wanted = run.config, options.count_overlap
    many = run.step * config.batch_size * run.task.sequence_length > OVERLAP_TOKENS
    if wanted is False or (wanted is None and many):
        return None
    if seed != config.seed:  # the count is defined for the run's own pair of streams
        return None
    shown = examples_shown(run.task, run.step, config.steps, config.curriculum, config.batch_size)
    return overlap(shown, split.task, seed, options.examples).share
