"""A sweep on a two-node Ray cluster of this machine. Run with `pytest -m ray` where ray is installed."""

from __future__ import annotations

import os
import re
import signal
import threading
import time

import pytest

from tests.training.killing import last_step
from tests.training.test_loop import assert_same_run
from tests.training.tiny import tiny_config
from traformer.sweeps.cell import Cell
from traformer.sweeps.ray import run_ray_sweep
from traformer.training.loop import train

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def cluster():
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    nodes.add_node(num_cpus=1)
    ray.init(address=nodes.address, log_to_driver=False)
    assert len([node for node in ray.nodes() if node["Alive"]]) == 2
    yield nodes
    ray.shutdown()
    nodes.shutdown()


def test_cells_run_on_both_nodes_and_a_failing_one_stops_no_other(cluster, tmp_path):
    cells = [Cell(f"cell{n}", tiny_config(seed=n, steps=300), "12", 5) for n in range(3)]
    train(tiny_config(steps=2, seed=9), tmp_path / "cell2", quiet=True)  # made with other settings: this cell must fail
    states = run_ray_sweep(cells, tmp_path, cluster.address)
    assert [state.status for state in states] == ["done", "done", "failed"]
    assert "was started with" in states[2].message
    assert len({state.node for state in states}) == 2
    again = run_ray_sweep(cells[:2], tmp_path, cluster.address)
    assert [state.status for state in again] == ["skipped", "skipped"]


def test_a_killed_worker_is_rescheduled_and_resumes(cluster, tmp_path):
    config = tiny_config(steps=1500, save_every=20)
    killed = []

    def kill_once():
        """kill -9 the worker that holds the run, once it has saved something."""
        path = tmp_path / "sweep" / "a"
        while last_step(path) < 200:
            time.sleep(0.05)
        pid = int(re.search(r"process (\d+)", (path / ".lock").read_text())[1])
        os.kill(pid, signal.SIGKILL)
        killed.append((pid, last_step(path)))

    killer = threading.Thread(target=kill_once, daemon=True)
    killer.start()
    (state,) = run_ray_sweep([Cell("a", config, "12", 5)], tmp_path / "sweep", cluster.address)
    killer.join(timeout=5)
    assert len(killed) == 1 and 200 <= killed[0][1] < 1500
    assert state.status == "done", state.message
    assert f"process {killed[0][0]} " not in (tmp_path / "sweep" / "a" / ".lock").read_text()  # another one ended it
    train(config.replace(save_every=1500), tmp_path / "whole", quiet=True)
    assert_same_run(tmp_path / "whole", tmp_path / "sweep" / "a", 1500)
