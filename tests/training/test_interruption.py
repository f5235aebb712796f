"""A run may lose its process at any moment and ends with the same bits."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest

from tests.training.killing import kill_at_random, last_step, start, start_command
from tests.training.test_loop import assert_same_run
from tests.training.tiny import tiny_config
from traformer.errors import RunError
from traformer.runs import checkpoint as checkpoints
from traformer.runs.folder import RunFolder
from traformer.training.loop import train

CHECKPOINT = "traformer.runs.checkpoint"


@pytest.mark.parametrize(("kills", "steps"), [(5, 175), pytest.param(20, 700, marks=pytest.mark.slow)])
def test_kills_at_random_moments(tmp_path, kills, steps):
    config = tiny_config(steps=steps, save_every=7, log_every=5)
    kill_at_random(config, tmp_path / "killed", kills=kills, seed=1)
    train(config.replace(save_every=steps), tmp_path / "whole", quiet=True)  # how often is saved changes nothing
    assert_same_run(tmp_path / "whole", tmp_path / "killed", steps)


@pytest.mark.parametrize(
    ("kill_at", "left_behind"),
    [
        (("traformer.training.loop", "save_file", 4), ".writing-step-8"),  # some of its files are there
        ((CHECKPOINT, "write_manifest", 2), ".writing-step-8"),  # files are there, the manifest is not
        (("traformer.storage", "sync_folder", 4), ".writing-step-8"),  # all is there, not yet renamed
        (("traformer.storage", "sync_folder", 5), "step-8"),  # renamed, the rename not yet durable
        ((CHECKPOINT, "rotate", 4), "step-12"),  # the new one is there, the oldest not yet deleted
        (("traformer.runs.folder", "write_atomically", 1), None),  # before config.yaml
        (("traformer.training.loop", "seed_step", 1), None),  # before the first step
    ],
)
def test_a_kill_inside_every_part_of_writing(tmp_path, kill_at, left_behind):
    config = tiny_config()
    process = start(config, tmp_path / "killed", kill_at)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    if left_behind:
        assert (tmp_path / "killed" / "checkpoints" / left_behind).is_dir()
    process = start(config, tmp_path / "killed")
    process.join()
    assert process.exitcode == 0
    train(config, tmp_path / "whole", quiet=True)
    assert_same_run(tmp_path / "whole", tmp_path / "killed", 12)
    kept = sorted(entry.name for entry in (tmp_path / "killed" / "checkpoints").iterdir())
    assert kept == ["step-12", "step-8"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_request_to_stop_saves_and_says_how_to_go_on(tmp_path, number):
    config = tiny_config(steps=150, save_every=150, log_every=5)
    path = tmp_path / "run"
    with start_command(config, path) as process:
        deadline = time.monotonic() + 120
        while last_step(path) < 20:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
        process.send_signal(number)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert f"and saved; continue with: tra train --resume --out {path}" in error and "Traceback" not in error
    (saved,) = checkpoints.all_checkpoints(path / "checkpoints")
    assert 20 <= saved.step < 150 and saved.fault() is None and f"step {saved.step} of 150" in error
    train(config, path, resume=True, quiet=True)
    train(config, tmp_path / "whole", quiet=True)
    assert_same_run(tmp_path / "whole", path, 150)


def test_second_process_on_a_folder_is_refused(tmp_path):
    config = tiny_config(steps=100_000)
    process = start(config, tmp_path / "run")
    try:
        while last_step(tmp_path / "run") < 5:
            assert process.is_alive()
            time.sleep(0.02)
        with pytest.raises(RunError, match=f"in use by process {process.pid}"):
            train(config, tmp_path / "run", resume=True, quiet=True)
        with pytest.raises(RunError, match="in use"):
            train(config, tmp_path / "run", overwrite=True, quiet=True)
    finally:
        process.kill()
        process.join()
    assert RunFolder(tmp_path / "run").is_run()  # the refused --overwrite deleted nothing


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 600 kB, and a way to give it more room."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(place)], capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"cannot mount a tmpfs: {made.stderr.strip()}")
    yield place, lambda: subprocess.run(["mount", "-o", "remount,size=20m", str(place)], check=True)
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_stops_cleanly_and_loses_nothing(tmp_path, small_disk):
    place, enlarge = small_disk
    config = tiny_config(steps=60, save_every=2, keep=50)
    with pytest.raises(RunError, match=r"the disk is full, so the checkpoint of step \d+ .*step-\d+ is intact"):
        train(config, place / "run", quiet=True)
    there = checkpoints.all_checkpoints(place / "run" / "checkpoints")
    assert len(there) > 1 and all(item.fault() is None for item in there)
    assert not list((place / "run" / "checkpoints").glob(".*"))
    with pytest.raises(RunError, match="the disk is full"):  # and again, while nothing was done about it
        train(config, place / "run", resume=True, quiet=True)
    enlarge()
    train(config, place / "run", resume=True, quiet=True)
    train(config, tmp_path / "whole", quiet=True)
    assert_same_run(tmp_path / "whole", place / "run", 60)


def test_a_full_disk_while_a_metrics_line_is_written(tmp_path, small_disk):
    place, _ = small_disk
    config = tiny_config(steps=60, save_every=4, log_every=1)

    def fill():
        with open(place / "filler", "wb", buffering=0) as filler, pytest.raises(OSError, match="No space"):
            while True:
                filler.write(b"x" * 4096)

    from traformer.training import loop

    original = loop._MetricsFile.write
    calls = []

    def write(self, line):
        calls.append(1)
        if len(calls) == 10:
            fill()
            line = {**line, "padding": "x" * 100_000}
        original(self, line)

    loop._MetricsFile.write = write
    try:
        with pytest.raises(
            RunError, match=r"the disk is full, so .*metrics\.jsonl was not written; .*step-8 is intact"
        ):
            train(config, place / "run", quiet=True)
    finally:
        loop._MetricsFile.write = original


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["tra", "rope"])
def test_kills_of_the_real_command(tmp_path, attention):
    import random

    config = tiny_config(attention=attention, steps=3000, save_every=11)
    chance = random.Random(7)
    kills = 0
    while kills < 20:
        process = start_command(config, tmp_path / "killed")
        before, wanted = last_step(tmp_path / "killed"), chance.randrange(1, 100)
        # Half of the kills wait for progress, so that the run gets on; the others come during start-up too.
        deadline = time.monotonic() + (60 if kills % 2 else chance.uniform(0.0, 6.0))
        while time.monotonic() < deadline and last_step(tmp_path / "killed") < before + wanted:
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        kills += 1
    process = start_command(config, tmp_path / "killed")
    assert process.communicate()[1] is not None and process.returncode == 0
    train(config, tmp_path / "whole", quiet=True)
    assert_same_run(tmp_path / "whole", tmp_path / "killed", 3000)
