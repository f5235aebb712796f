from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from tests.training.tiny import tiny_config, without_dropout
from traformer.errors import InputError, RunError
from traformer.models.from_run import build_model, load_run
from traformer.runs.folder import RunFolder
from traformer.tasks import build_task
from traformer.training import loop
from traformer.training.loop import train
from traformer.training.loss import AnswerLoss, step_seed


def tensors(path, step):
    folder = path / "checkpoints" / f"step-{step}"
    return {**load_file(folder / "model.safetensors"), **load_file(folder / "optimizer.safetensors")}


def metrics(path):
    return [{key: value for key, value in row.items() if key != "clock"} for row in RunFolder(path).read_metrics()]


def assert_same_run(one, other, step):
    assert metrics(one) == metrics(other)
    ours, theirs = tensors(one, step), tensors(other, step)
    assert ours.keys() == theirs.keys() and len(ours) > 20
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert (one / "checkpoints" / f"step-{step}" / "state.json").read_bytes() == (
        other / "checkpoints" / f"step-{step}" / "state.json"
    ).read_bytes()


def test_loss_is_that_of_the_answer_tokens_alone():
    config = without_dropout()
    task = build_task(config.task, config.task_options)
    model = build_model(config, task).eval()
    batch = task.examples(seed=3, start=0, count=5)
    loss_sum, correct = AnswerLoss(model)(batch.input_ids, batch.answers)
    with torch.no_grad():
        output = model(input_ids=batch.input_ids, labels=batch.labels())
    count = int(batch.answers.sum())
    assert loss_sum.item() / count == pytest.approx(output.loss.item(), rel=1e-5)
    guesses = output.logits[:, :-1].argmax(-1)
    assert int(correct) == int(((guesses == batch.input_ids[:, 1:]) & batch.answers[:, 1:]).sum())


def test_training_learns_and_writes_its_folder(tmp_path):
    config = tiny_config(steps=150, log_every=50, save_every=70)
    result = train(config, tmp_path / "run", quiet=True)
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [50, 100, 150]
    assert rows[-1]["loss"] < 0.8 * rows[0]["loss"] and result.last["loss"] == rows[-1]["loss"]
    assert rows[-1]["examples"] == 150 * 8 and rows[-1]["tokens"] == 150 * 8 * 12
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == ["step-140", "step-150"]
    model, task, loaded, step = load_run(tmp_path / "run", device="cpu")
    assert (step, loaded, task.name) == (150, config, "flip_flop") and not model.training
    from traformer.models import TraformerForCausalLM

    again = TraformerForCausalLM.from_pretrained(tmp_path / "run" / "checkpoints" / "step-150").eval()
    ids = task.examples(seed=0, start=0, count=2).input_ids
    with torch.no_grad():
        assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)


@pytest.mark.parametrize("attention", ["tra", "rope"])
def test_resume_is_exact_with_dropout_between_log_lines(tmp_path, attention):
    config = tiny_config(attention=attention)  # checkpoints at 4, 8, 12; log lines at 5, 10, 12
    train(config, tmp_path / "whole", quiet=True)
    train(config, tmp_path / "broken", quiet=True)
    # As if killed right after step 4 was saved, with lines written up to step 10 and one torn.
    shutil.rmtree(tmp_path / "broken" / "checkpoints" / "step-12")
    shutil.rmtree(tmp_path / "broken" / "checkpoints" / "step-8")
    with open(tmp_path / "broken" / "metrics.jsonl", "a") as handle:
        handle.write('{"step": 1')
    train(config, tmp_path / "broken", resume=True, quiet=True)  # from the start: nothing is left
    assert_same_run(tmp_path / "whole", tmp_path / "broken", 12)
    shutil.rmtree(tmp_path / "broken" / "checkpoints" / "step-12")
    train(config, tmp_path / "broken", resume=True, quiet=True)  # from step 8
    assert_same_run(tmp_path / "whole", tmp_path / "broken", 12)


def test_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path, capfd):
    config = tiny_config()
    train(config, tmp_path / "whole", quiet=True)
    train(config, tmp_path / "broken", quiet=True)
    file = tmp_path / "broken" / "checkpoints" / "step-12" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    train(config.replace(keep=1), tmp_path / "broken", resume=True)
    assert "step-12 is damaged (model.safetensors has" in capfd.readouterr().err
    assert_same_run(tmp_path / "whole", tmp_path / "broken", 12)
    left = sorted(entry.name for entry in (tmp_path / "broken" / "checkpoints").iterdir())
    assert left == ["damaged-step-12", "step-12"]


def test_a_folder_that_exists_is_refused(tmp_path):
    config = tiny_config(steps=2)
    train(config, tmp_path / "run", quiet=True)
    with pytest.raises(RunError, match="--resume to continue it, --overwrite to replace it"):
        train(config, tmp_path / "run", quiet=True)
    with pytest.raises(RunError, match="there is no run folder"):
        train(config, tmp_path / "absent", resume=True, quiet=True)
    train(config.replace(seed=1), tmp_path / "run", overwrite=True, quiet=True)
    assert RunFolder(tmp_path / "run").read_config().seed == 1
    assert train(config.replace(seed=1), tmp_path / "run", resume=True, quiet=True).seconds == 0.0


def test_overwrite_never_deletes_other_files(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(RunError, match="not a run folder"):
        train(tiny_config(), tmp_path, overwrite=True, quiet=True)
    assert (tmp_path / "thesis.tex").exists()


def test_seed_changes_the_run_and_repeats_it(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(tiny_config(seed=seed, steps=5), tmp_path / name, quiet=True)
    assert metrics(tmp_path / "a") == metrics(tmp_path / "b") != metrics(tmp_path / "c")


def test_accumulation_gives_the_same_run_to_rounding(tmp_path):
    train(without_dropout(task="induction", task_options={"max_length": 9}), tmp_path / "one", quiet=True)
    train(
        without_dropout(task="induction", task_options={"max_length": 9}, accumulate=4), tmp_path / "four", quiet=True
    )
    one, four = metrics(tmp_path / "one"), metrics(tmp_path / "four")
    assert [row["loss"] for row in one] == pytest.approx([row["loss"] for row in four], rel=1e-5)
    assert [row["tokens"] for row in one] == [row["tokens"] for row in four]


def test_clipping_limits_the_step(tmp_path):
    base = without_dropout(steps=3, log_every=1)
    train(base, tmp_path / "free", quiet=True)
    train(base.replace(clip=1e-3), tmp_path / "clipped", quiet=True)
    free, clipped = metrics(tmp_path / "free"), metrics(tmp_path / "clipped")
    assert clipped[0]["gradient_norm"] == free[0]["gradient_norm"] > 1e-3  # reported before it is clipped
    moments = load_file(tmp_path / "clipped" / "checkpoints" / "step-3" / "optimizer.safetensors")
    first_moments = torch.cat([value.flatten() for name, value in moments.items() if name.startswith("exp_avg/")])
    assert 0 < first_moments.norm() <= 1e-3


def test_bfloat16_autocast_trains_and_keeps_float32_weights(tmp_path):
    train(tiny_config(dtype="bfloat16", attention="rope"), tmp_path / "run", quiet=True)
    saved = tensors(tmp_path / "run", 12)
    assert all(value.dtype == torch.float32 for value in saved.values())
    train(tiny_config(attention="rope"), tmp_path / "full", quiet=True)
    low, full = metrics(tmp_path / "run"), metrics(tmp_path / "full")
    assert low != full and low[-1]["loss"] == pytest.approx(full[-1]["loss"], rel=0.1)


def test_non_finite_loss_stops_and_keeps_the_last_good(tmp_path, monkeypatch):
    original = loop.AnswerLoss.forward
    calls = []

    def forward(self, input_ids, answers):
        calls.append(1)
        loss, correct = original(self, input_ids, answers)
        return (loss * float("nan") if len(calls) == 7 else loss), correct

    monkeypatch.setattr(loop.AnswerLoss, "forward", forward)
    with pytest.raises(RunError, match=r"the loss became nan at step 7.*last good checkpoint is step 4"):
        train(tiny_config(), tmp_path / "run", quiet=True)
    model, _, _, step = load_run(tmp_path / "run", device="cpu")
    assert step == 4 and all(bool(torch.isfinite(value).all()) for value in model.state_dict().values())


def test_non_finite_gradient_stops_before_it_is_used(tmp_path, monkeypatch):
    original = loop.AnswerLoss.forward

    class Poison(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * float("inf")

    def forward(self, input_ids, answers):
        loss, correct = original(self, input_ids, answers)
        return Poison.apply(loss), correct

    monkeypatch.setattr(loop.AnswerLoss, "forward", forward)
    with pytest.raises(RunError, match=r"gradient's norm became (nan|inf) at step 1.*nothing was saved yet"):
        train(tiny_config(), tmp_path / "run", quiet=True)


def test_a_length_beyond_memory_is_said_before_it_is_tried(tmp_path):
    config = tiny_config(task_options={"length": 2**34})
    with pytest.raises(InputError, match=r"sequences of 17179869184 tokens at once needs about [\d,.]+ GiB.*--length"):
        train(config, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"task": "flipflop"}, "unknown task 'flipflop'; did you mean 'flip_flop'"),
        ({"attention": "ropee"}, "unknown attention 'ropee'; did you mean 'rope'"),
        ({"preset": "mni"}, "unknown preset 'mni'; did you mean 'mini'"),
        ({"task_options": {"lenght": 12}}, "did you mean 'length'"),
        ({"model_options": {"hiden_size": 12}}, "did you mean 'hidden_size'"),
        ({"model_options": {"vocab_size": 12}}, "vocab_size"),
        ({"attention_options": {"threshhold": 1}}, "threshhold"),
        ({"device": "cudda"}, "device 'cudda'"),
    ],
)
def test_unknown_names_leave_no_folder(tmp_path, changes, words):
    with pytest.raises(InputError, match=words):
        train(tiny_config(**changes), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_step_seeds_differ():
    seeds = {step_seed(seed, step, rank) for seed in range(5) for step in range(50) for rank in range(4)}
    assert len(seeds) == 1000 and all(0 <= seed < 2**63 for seed in seeds)


def test_state_holds_no_wall_clock(tmp_path):
    train(tiny_config(steps=4), tmp_path / "run", quiet=True)
    state = json.loads((tmp_path / "run" / "checkpoints" / "step-4" / "state.json").read_text())
    assert state["step"] == 4 and not any("second" in name or "time" in name for name in state)


def test_tensorboard_is_optional(tmp_path, monkeypatch):
    import sys

    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "torch.utils.tensorboard", None)
        with pytest.raises(InputError, match=r"tensorboard is not installed.*traformer\[tensorboard\]"):
            train(tiny_config(tensorboard=True), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
    pytest.importorskip("tensorboard")
    train(tiny_config(tensorboard=True), tmp_path / "run", quiet=True)
    assert list((tmp_path / "run" / "tensorboard").glob("events.*"))


def test_progress_is_lines_in_a_pipe_and_a_bar_on_a_terminal(capfd):
    import io

    from rich.console import Console

    from traformer.training.progress import TrainingProgress

    with TrainingProgress("run", 10) as progress:
        progress.step(5, 0.5, 100.0)
        progress.log(5, 0.5, 0.25, 1e-3, 100.0)
    assert capfd.readouterr().err == "run  step 5/10  loss 0.5000  accuracy 0.250  lr 1.00e-03  100 tokens/s\n"
    terminal = io.StringIO()
    with TrainingProgress("run", 10, console=Console(file=terminal, force_terminal=True, width=120)) as progress:
        progress.step(10, 0.5, 12345.0)
        progress.log(10, 0.5, 0.25, 1e-3, 100.0)
    shown = terminal.getvalue()
    assert "10/10" in shown and "loss 0.5000" in shown and "12,345 tokens/s" in shown and "accuracy" not in shown
