"""The table of peers as a list: cells can be built, methods are treated alike, the search is read back right."""

from __future__ import annotations

import json

import pytest

from traformer.errors import InputError, RunError
from traformer.experiments import copy_seeds, peers, peers_lr
from traformer.models.from_run import build_model_config
from traformer.runs.folder import RunFolder
from traformer.tasks import build_task


def test_every_cell_can_be_built():
    cells = peers.cells()
    assert len(cells) == len({cell.name for cell in cells}) == 2 * 4 * len(peers.METHODS)
    for cell in [*cells, *peers_lr.cells()]:
        task = build_task(cell.config.task, cell.config.task_options)
        build_model_config(cell.config, task)
        factors = [split.size / task.length_range[1] for split in task.test_splits(cell.lengths)]
        assert 1.0 in factors
        if cell in cells:
            assert sorted(set(factors)) == [1, 2, 4, 8]


def test_the_seeds_of_copy_are_the_tables_run_for_longer():
    table = {cell.name: cell for cell in peers.cells()}
    cells = copy_seeds.cells()
    assert {cell.config.attention for cell in cells} == {"tra", "tra_plus", "rope"} and len(cells) == 12
    for cell in cells:
        config, other = cell.config, table[cell.name]
        kept = config.replace(steps=other.config.steps, save_every=other.config.save_every, keep=other.config.keep)
        assert kept == other.config and cell.lengths == other.lengths
        assert config.steps == config.keep * config.save_every  # every checkpoint stays


def test_methods_differ_in_attention_rate_and_seed_alone():
    for task, (config, _) in peers.TASKS.items():
        for cell in peers.cells():
            if cell.config.task == task:
                alike = cell.config.replace(attention=config.attention, seed=config.seed, lr=config.lr)
                assert alike == config


def test_the_search_takes_the_lowest_loss(tmp_path, monkeypatch):
    for cell in peers_lr.cells():
        folder = RunFolder(tmp_path / cell.name)
        folder.write_config(cell.config, {})
        loss = abs(cell.config.lr - (max if cell.config.attention == "rope" else min)(peers_lr.RATES))
        lines = [{"step": step, "loss": 5.0 if step == 1 else loss} for step in range(1, 5)]
        folder.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert peers_lr.main([str(tmp_path)]) == 0
    monkeypatch.setenv(peers.RATES_VARIABLE, str(tmp_path / "learning_rates.json"))
    rates = {(cell.config.task, cell.config.attention): cell.config.lr for cell in peers.cells()}
    assert rates["copy", "rope"] == rates["flip_flop", "rope"] == max(peers_lr.RATES)
    assert rates["copy", "tra"] == min(peers_lr.RATES)


def test_rates_that_cannot_be_read_are_told(tmp_path, monkeypatch):
    monkeypatch.setenv(peers.RATES_VARIABLE, str(tmp_path / "absent.json"))
    with pytest.raises(InputError, match=r"absent.json, which TRAFORMER_PEERS_RATES names, is not a file of learning"):
        peers.cells()


def test_an_unfinished_search_is_told(tmp_path):
    with pytest.raises(RunError, match="there is no run folder"):
        peers_lr.choose(tmp_path)
