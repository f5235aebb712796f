"""Training in parts of similar length: the same gradients with less padding, in a fixed number of parts."""

from __future__ import annotations

import pytest
import torch

from tests.training.tiny import without_dropout
from traformer.models.from_run import build_model
from traformer.tasks import build_task
from traformer.training import loop, padding
from traformer.training.loss import AnswerLoss
from traformer.training.padding import similar_lengths

CPU = torch.device("cpu")


def copy_of(max_length=24):
    return build_task("copy", {"max_length": max_length, "alphabet": "unique"})


def test_parts_hold_every_example_once_and_only_drop_padding():
    batch = copy_of().examples(seed=1, start=0, count=37)
    parts = batch.by_length(4)
    assert [len(part) for part in parts] == [10, 9, 9, 9]
    rows = [row for part in parts for row in part.input_ids]
    left = [row.tolist() for row in batch.input_ids]
    for part in parts:
        assert part.input_ids.shape == part.answers.shape == part.sources.shape == (len(part), int(part.lengths.max()))
    for row in rows:
        padded = row.tolist() + [0] * (batch.input_ids.shape[1] - len(row))
        left.remove(padded)
    assert not left
    assert sum(int(part.answers.sum()) for part in parts) == int(batch.answers.sum())
    longest = [int(part.lengths.max()) for part in parts]
    assert longest == sorted(longest) and sum(p.input_ids.numel() for p in parts) < 0.75 * batch.input_ids.numel()


@pytest.mark.parametrize("attention", ["tra_plus", "rope", "fot"])
def test_gradients_are_those_of_the_padded_batch(attention):
    task = copy_of()
    config = without_dropout(task="copy", task_options={"max_length": 24, "alphabet": "unique"}, attention=attention)
    model = build_model(config, task).double().train()
    batch = task.examples(seed=1, start=0, count=16)

    def gradients(parts):
        model.zero_grad()
        for part in parts:
            AnswerLoss(model)(part.input_ids, part.answers)[0].backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    whole, split = gradients([batch]), gradients(batch.by_length(3))
    assert whole.keys() == split.keys()
    for name, gradient in whole.items():
        torch.testing.assert_close(
            split[name], gradient, rtol=1e-9, atol=1e-11, msg=lambda text, n=name: f"{n}: {text}"
        )


def test_the_number_of_parts_follows_from_the_sizes_alone():
    task = copy_of(50)
    for seed in range(5):  # whatever is drawn: processes of a group must take as many turns
        assert len(similar_lengths(task, task.examples(seed=seed, start=0, count=64), CPU)) == 4
    assert len(similar_lengths(task, task.examples(seed=0, start=0, count=8), CPU)) == 1  # too small to be worth it
    assert len(similar_lengths(task, task.examples(seed=0, start=0, count=3), torch.device("cuda"))) == 1
    fixed = build_task("flip_flop", {"length": 512})
    batch = fixed.examples(seed=0, start=0, count=16)
    assert similar_lengths(fixed, batch, CPU) == [batch]  # every example has the same length


def test_training_takes_the_parts_and_counts_as_before(tmp_path, monkeypatch):
    config = without_dropout(
        task="copy",
        task_options={"max_length": 24, "alphabet": "unique"},
        steps=3,
        batch_size=32,
        log_every=1,
        save_every=3,
    )
    shapes = []
    inner = AnswerLoss.forward

    def watching(self, input_ids, answers):
        shapes.append(tuple(input_ids.shape))
        return inner(self, input_ids, answers)

    monkeypatch.setattr(AnswerLoss, "forward", watching)
    in_parts = loop.train(config, tmp_path / "parts", quiet=True)
    assert len(shapes) == 3 and all(rows == 32 for rows, _ in shapes)  # 32 x 51 tokens: one part
    shapes.clear()
    monkeypatch.setitem(padding.PART_TOKENS, "cpu", 256)
    split = loop.train(config, tmp_path / "split", quiet=True)
    assert len(shapes) == 12 and all(rows == 8 for rows, _ in shapes)
    assert split.last["tokens"] == in_parts.last["tokens"] and split.last["examples"] == in_parts.last["examples"]
    assert split.last["loss"] == pytest.approx(in_parts.last["loss"], rel=1e-4)
