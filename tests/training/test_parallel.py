"""Two processes on this machine's CPUs (gloo): the same run as one process, to rounding."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
import yaml

from tests.training.killing import last_step
from tests.training.test_loop import metrics, tensors
from tests.training.tiny import without_dropout
from traformer.errors import InputError, TraformerError
from traformer.runs import checkpoint as checkpoints
from traformer.training.loop import first_example, per_process, train
from traformer.training.parallel import Parallel

# Lengths differ, so the two processes' shares differ in answers and in width. The batch is large enough that one
# process takes it in four parts of similar length, each of two processes its share in two.
CONFIG = without_dropout(task="copy", task_options={"max_length": 6, "vocabulary": 12}, batch_size=320, clip=1.0)
LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--nproc-per-node", "2", "--master-port"],
    "accelerate": ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port"],
}


def launch(*command: str, launcher: str = "torchrun", processes: int = 2) -> subprocess.Popen[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    start = [sys.executable, "-m", *LAUNCHERS[launcher], port]
    start[start.index("2")] = str(processes)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    return subprocess.Popen(
        [*start, *command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def train_with(path, config, kind, *more, launcher="torchrun", processes=2):
    file = path.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(config.to_dict()))
    process = launch(
        "-m", "traformer", "train", "--config", str(file), "--out", str(path), "--parallel", kind, *more,
        launcher=launcher, processes=processes,
    )  # fmt: skip
    output, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    return output, error


def assert_close_runs(one, other, step):
    ours, theirs = metrics(one), metrics(other)
    assert len(ours) == len(theirs) > 0
    for mine, yours in zip(ours, theirs, strict=True):
        assert mine["loss"] == pytest.approx(yours["loss"], rel=2e-5)
        assert mine["gradient_norm"] == pytest.approx(yours["gradient_norm"], rel=1e-3)
        for exact in ("step", "examples", "tokens", "lr", "accuracy"):
            assert mine[exact] == yours[exact]
    mine_all, yours_all = tensors(one, step), tensors(other, step)
    assert mine_all.keys() == yours_all.keys()
    for name in mine_all:
        torch.testing.assert_close(mine_all[name], yours_all[name], rtol=1e-3, atol=1e-4)


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    path = tmp_path_factory.mktemp("single") / "run"
    train(CONFIG, path, quiet=True)
    return path


def test_ddp_equals_one_process_and_resumes_on_one(tmp_path, single):
    half = CONFIG.replace(accumulate=2)
    train_with(tmp_path / "two", half, "ddp")
    assert_close_runs(single, tmp_path / "two", 12)
    config = (tmp_path / "two" / "config.yaml").read_text()
    assert "processes: 2" in config and "parallel: ddp" in config
    # What two processes wrote, one goes on with.
    import shutil

    shutil.rmtree(tmp_path / "two" / "checkpoints" / "step-12")
    train(half, tmp_path / "two", resume=True, quiet=True)
    assert_close_runs(single, tmp_path / "two", 12)


def test_fsdp_shards_equals_one_process_and_resumes_both_ways(tmp_path, single):
    worker = [str(os.path.join(os.path.dirname(__file__), "sharded_worker.py"))]
    process = launch(*worker, str(tmp_path / "two"), json.dumps(CONFIG.to_dict()))
    output, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    assert "sharded: " in output
    assert_close_runs(single, tmp_path / "two", 12)
    # One process's checkpoint goes on under two: whole tensors are shared out again.
    import shutil

    shutil.copytree(single, tmp_path / "one")
    shutil.rmtree(tmp_path / "one" / "checkpoints" / "step-12")
    train_with(tmp_path / "one", CONFIG, "fsdp", "--resume")
    assert_close_runs(single, tmp_path / "one", 12)
    # And theirs under one.
    shutil.rmtree(tmp_path / "two" / "checkpoints" / "step-12")
    train(CONFIG, tmp_path / "two", resume=True, quiet=True)
    assert_close_runs(single, tmp_path / "two", 12)


@pytest.mark.slow
def test_accelerate_launch_starts_the_same_run(tmp_path, single):
    train_with(tmp_path / "ddp", CONFIG, "ddp", launcher="accelerate")
    assert_close_runs(single, tmp_path / "ddp", 12)
    train_with(tmp_path / "fsdp", CONFIG, "fsdp", launcher="accelerate")
    assert_close_runs(single, tmp_path / "fsdp", 12)


@pytest.mark.slow
def test_fsdp_with_accumulation_and_bfloat16(tmp_path, single):
    train_with(tmp_path / "parts", CONFIG.replace(accumulate=2), "fsdp")
    assert_close_runs(single, tmp_path / "parts", 12)
    low = CONFIG.replace(dtype="bfloat16", attention="rope")
    train_with(tmp_path / "two", low, "fsdp")
    train(low, tmp_path / "low", quiet=True)
    assert metrics(tmp_path / "two")[-1]["loss"] == pytest.approx(metrics(tmp_path / "low")[-1]["loss"], rel=0.02)


@pytest.mark.slow
def test_four_processes_resume_what_two_wrote(tmp_path, single):
    train_with(tmp_path / "run", CONFIG, "fsdp")
    import shutil

    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-12")
    train_with(tmp_path / "run", CONFIG, "fsdp", "--resume", processes=4)
    assert_close_runs(single, tmp_path / "run", 12)


@pytest.mark.slow
def test_all_processes_stop_together_and_save(tmp_path):
    config = CONFIG.replace(steps=100_000, save_every=100_000)
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config.to_dict()))
    path = tmp_path / "run"
    process = launch("-m", "traformer", "train", "--config", str(file), "--out", str(path))
    deadline = time.monotonic() + 120
    while last_step(path) < 10:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=60)
    assert process.returncode != 0
    (saved,) = checkpoints.all_checkpoints(path / "checkpoints")
    assert saved.step >= 10 and saved.fault() is None
    assert "continue with: tra train --resume" in error


@pytest.mark.slow
def test_an_error_in_the_main_process_ends_them_all(tmp_path, single):
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(CONFIG.to_dict()))
    process = launch("-m", "traformer", "train", "--config", str(file), "--out", str(single))
    _, error = process.communicate(timeout=120)
    assert process.returncode != 0 and "exists; give --resume" in error


def test_no_example_is_seen_twice():
    """The shares of all processes and parts are the global batch, each example once."""
    config = CONFIG.replace(batch_size=24, accumulate=4)
    seen = []
    for rank in range(3):
        group = Parallel("ddp", rank, 3, torch.device("cpu"))
        for step in range(5):
            for part in range(4):
                start = first_example(config, group, step, part)
                seen += range(start, start + per_process(config, group))
    assert sorted(seen) == list(range(5 * 24))


def test_batch_that_does_not_divide(monkeypatch, tmp_path):
    group = Parallel("ddp", 0, 3, torch.device("cpu"))
    config = CONFIG.replace(batch_size=8)
    with pytest.raises(InputError, match="batch_size 8 does not divide by 3 processes"):
        per_process(config, group)
    assert per_process(config.replace(accumulate=2), Parallel("ddp", 0, 2, group.device)) == 2


def test_errors_are_the_users():
    with pytest.raises(TraformerError, match="unknown parallel 'dpp'; did you mean 'ddp'"):
        Parallel.start("dpp", "cpu")
    with pytest.raises(TraformerError, match="needs several processes"):
        Parallel.start("fsdp", "cpu")
