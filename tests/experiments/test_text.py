"""Runs by name, the paper's parameter count, the laptop experiment's cells."""

from __future__ import annotations

from pathlib import Path

import pytest

from traformer.data.corpus import HUB
from traformer.data.python_stdlib import is_stdlib
from traformer.errors import InputError
from traformer.experiments import text
from traformer.experiments.configs import CONFIGS, TEXT_PAPER, read_config
from traformer.models import TraformerConfig, TraformerForCausalLM
from traformer.sweeps.find import experiment_cells, find_experiment


def test_the_papers_language_model_has_the_stated_parameters() -> None:
    import torch

    config = TraformerConfig.preset(TEXT_PAPER.preset, vocab_size=50_257, attention="tra", pad_token_id=None)
    with torch.device("meta"):
        model = TraformerForCausalLM(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == 72_500_800
    assert (TEXT_PAPER.task_options["length"], TEXT_PAPER.batch_size, TEXT_PAPER.steps) == (128, 64, 100_000)


def test_configs_by_name_and_by_file(tmp_path: Path) -> None:
    assert read_config("text-laptop") is CONFIGS["text-laptop"]
    (tmp_path / "mine.yaml").write_text("task: copy\nsteps: 7\n")
    assert read_config(str(tmp_path / "mine.yaml")).steps == 7
    with pytest.raises(InputError, match="did you mean 'text-laptop'"):
        read_config("text-labtop")


def test_shipped_configs_need_no_files_of_ours() -> None:
    for name, config in CONFIGS.items():
        if config.task == "text":
            places = config.task_options["data"]
            assert all(place in HUB or is_stdlib(place) for place in places), name


def test_the_laptop_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAFORMER_TEXT", "/some/where")
    cells = experiment_cells(find_experiment("text"))
    assert len({cell.name for cell in cells}) == 14
    assert {"tra", "rope", "alibi", "nope", "fot", "tra_plus"} < {cell.config.attention for cell in cells}
    assert {cell.config.seed for cell in cells} == {0, 1}
    assert all(cell.config.task_options["data"] == ["/some/where"] for cell in cells)
    same = {repr(cell.config.replace(attention="tra", seed=0)) for cell in cells}
    assert len(same) == 1  # nothing but the attention and the seed differs
    assert text.WINDOWS.split(",")[-1] == "4096"
