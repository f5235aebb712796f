"""Exact match, token accuracy and error per read by split and length, into the run's results.json."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from traformer.devices import flush_denormals
from traformer.errors import InputError
from traformer.evaluation.batches import batch_sizes
from traformer.evaluation.watcher import Watcher
from traformer.models.from_run import load_run
from traformer.runs.config import RunConfig
from traformer.runs.folder import RunFolder
from traformer.tasks.base import Batch, Split, Task
from traformer.tasks.metrics import Proportion, Scores, Tally, score
from traformer.tasks.overlaps import overlap
from traformer.tasks.text import Text
from traformer.training.loss import answer_logits

Row = dict[str, Any]
# Counting the test examples that training has shown means drawing all of training again; done by itself up to this.
OVERLAP_TOKENS = 20_000_000


def evaluate_run(
    path: str | Path,
    lengths: str | Iterable[int | str] | None = None,
    examples: int = 256,
    *,
    seed: int | None = None,
    step: int | None = None,
    batch_tokens: int | None = None,
    device: str = "auto",
    count_overlap: bool | None = None,
    again: bool = False,
    watcher: Watcher | None = None,
    **text_options: Any,
) -> list[Row]:
    """Measure a run's model and write results.json after every split, so that an interrupted evaluation goes on.

    What was measured before with the same examples is not measured again unless `again` is set. Test examples come
    from the test stream of `seed`, by default the run's own. `count_overlap`: tell how many test examples training has
    shown; None does so where that is quick. A text run is measured by perplexity; `text_options` (stride, split, data)
    are for it alone.
    """
    if examples < 1:
        raise InputError(f"examples is {examples}; give a whole number above zero")
    watcher = watcher or Watcher()
    folder = RunFolder.open(path)
    model, task, config, step = load_run(path, device=device, step=step, warn=watcher.say)
    if isinstance(task, Text):
        if seed is not None or count_overlap:
            raise InputError("seed and overlap do not apply to text, which is read as it stands; leave them out")
        from traformer.evaluation.perplexity import evaluate_text

        return evaluate_text(
            folder, model, task, config, step, lengths, examples,
            batch_tokens=batch_tokens, again=again, watcher=watcher, **text_options,
        )  # fmt: skip
    for name, value in text_options.items():
        if value is not None:
            raise InputError(f"{name} is for text runs; leave it out for {config.task}")
    seed = config.seed if seed is None else seed
    splits = task.test_splits(lengths)
    sizes = batch_sizes(model.config, splits, examples, batch_tokens, next(model.parameters()).device)

    stored = [] if again else folder.read_results()
    wanted: list[Row] = []
    missing: list[Split] = []
    for split in splits:
        found = [
            row for row in stored if _is_of(row, split, step) and (row["examples"], row["seed"]) == (examples, seed)
        ]
        wanted += found
        if not found:
            missing.append(split)
    watcher.start(sum(examples * split.task.sequence_length for split in missing))
    for split in missing:
        tallies = measure(model, split, examples, Task.test_seed(seed), sizes[split], watcher.advance)
        shared = _overlap(config, task, split, seed, examples, step, count_overlap)
        rows = list(_rows(config, task, split, tallies, examples, seed, step, shared))
        stored = [row for row in stored if not _is_of(row, split, step)] + rows
        wanted += rows
        folder.write_results(stored)
    order = {(split.name, _length(split)): place for place, split in enumerate(splits)}
    return sorted(wanted, key=lambda row: order[row["split"].split("/")[0], row["length"]])


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


def _rows(
    config: RunConfig, task: Task, split: Split, tallies: dict[str, Tally], examples: int, seed: int, step: int,
    shared: float | None,
) -> Iterable[Row]:  # fmt: skip
    for label, tally in tallies.items():
        metrics: dict[str, Proportion] = {
            "exact_match": tally.exact_match(),
            "token_accuracy": tally.token_accuracy(),
        }
        if config.task == "flip_flop":
            metrics["error_per_read"] = tally.error_per_answer()
        for metric, share in metrics.items():
            row = {
                "task": config.task,
                "split": f"{split.name}/{label}" if label else split.name,
                "length": _length(split),
                "metric": metric,
                "value": share.value,
                "low": share.low,
                "high": share.high,
                "examples": examples,
                "counted": share.count,
                "seed": seed,
                "attention": config.attention,
                "step": step,
                "train_length": task.length_range[1],
            }
            chance = split.task.chance(metric) if metric != "error_per_read" and not label else None
            yield {
                **row,
                **({"chance": chance} if chance is not None else {}),
                **({"seen_in_training": shared} if shared is not None and metric == "exact_match" else {}),
            }


def _length(split: Split) -> int | str:
    """A number where all sequences have that length, else a range such as "51-100"."""
    return int(split.length) if split.length.isdigit() else split.length


def _is_of(row: Row, split: Split, step: int) -> bool:
    return row["split"].split("/")[0] == split.name and row["length"] == _length(split) and row["step"] == step


def _overlap(
    config: RunConfig, task: Task, split: Split, seed: int, examples: int, step: int, wanted: bool | None
) -> float | None:
    shown = step * config.batch_size
    if wanted is False or (wanted is None and shown * task.sequence_length > OVERLAP_TOKENS):
        return None
    if seed != config.seed:  # the count is defined for the run's own pair of streams
        return None
    return overlap(task, split.task, seed, examples, shown).share
