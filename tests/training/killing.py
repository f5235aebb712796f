"""Training runs that are killed: in forked processes (torch is loaded once) or as the real command.

As a program it is the long campaign whose figures docs/training.md gives:
    python -m tests.training.killing --kills 50
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.training.tiny import tiny_config
from traformer.runs.config import RunConfig
from traformer.runs.folder import RunFolder

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["traformer.training.loop", "traformer.models"])


def train_in_child(config: RunConfig, path: str, kill_at: tuple[str, str, int] | None = None) -> None:
    """Start or resume. `kill_at` (module, function, call number): die by kill -9 just before that call."""
    from traformer.training.loop import train

    if kill_at is not None:
        module_name, function, number = kill_at
        module = sys.modules[module_name]
        original = getattr(module, function)
        calls = 0

        def killing(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        setattr(module, function, killing)
    train(config, path, resume=RunFolder(path).is_run(), quiet=True)


def start(config: RunConfig, path: Path, kill_at: tuple[str, str, int] | None = None):
    process = _SERVER.Process(target=train_in_child, args=(config, str(path), kill_at))
    process.start()
    return process


def start_command(config: RunConfig, path: Path):
    """The same as the command a person types, as a process of its own."""
    import yaml

    file = path.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(config.to_dict()))
    again = ["--resume"] if RunFolder(path).is_run() else []
    command = [sys.executable, "-m", "traformer", "train", "--config", str(file), "--out", str(path), *again]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def last_step(path: Path) -> int:
    rows = RunFolder(path).read_metrics()
    return rows[-1]["step"] if rows else 0


STEPS_A_KILL = 12


def kill_at_random(config: RunConfig, path: Path, kills: int, seed: int) -> int:
    """Kill and resume `kills` times at random moments, then let the run end.

    A kill comes after 0 to STEPS_A_KILL further steps were logged and a random time of up to 0.1 s on top, so some
    come while the process starts. Returns how many of the kills left something half written.
    """
    assert config.steps > kills * (STEPS_A_KILL + 20)
    chance = random.Random(seed)
    torn = 0
    for number in range(kills):
        before, further = last_step(path), chance.randrange(STEPS_A_KILL)
        process = start(config, path)
        while process.is_alive() and last_step(path) < before + further:
            time.sleep(0.002)
        process.join(timeout=chance.uniform(0.0, 0.1))
        assert process.exitcode is None, f"the run ended after {number} kills; give it more steps"
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL
        torn += bool(list(path.glob("checkpoints/.*"))) or bool(list(path.glob("*.writing")))
    process = start(config, path)
    process.join()
    assert process.exitcode == 0
    return torn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--attention", default="tra")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    from tests.training.test_loop import assert_same_run
    from traformer.training.loop import train

    config = tiny_config(attention=args.attention, steps=100 * args.kills, save_every=7)
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        torn = kill_at_random(config, Path(folder) / "killed", args.kills, args.seed)
        print(f"{args.kills} kills -9, {args.kills} resumes, {torn} of them left something half written,", end=" ")
        train(config, Path(folder) / "whole", quiet=True)
        assert_same_run(Path(folder) / "whole", Path(folder) / "killed", config.steps)
        print(f"{config.steps} steps of {args.attention}: bit-equal; {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
