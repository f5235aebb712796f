from __future__ import annotations

import dataclasses

import pytest
import yaml

from tests.training.tiny import tiny_config
from traformer.errors import InputError, RunError
from traformer.runs.config import RunConfig


def test_yaml_round_trip(tmp_path):
    config = tiny_config(lr=3e-5, task="instructions", task_options={"instructions": ("copy", "reverse")}, clip=1.0)
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({**config.to_dict(), "versions": {"torch": "x"}, "environment": {}}))
    assert RunConfig.from_file(file) == config


def test_numbers_that_yaml_reads_as_text(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("lr: 1e-3\nsteps: 10\nclip: null\n")  # YAML 1.1 takes 1e-3 for a word
    config = RunConfig.from_file(file)
    assert config.lr == 1e-3 and config.clip is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"steps": 0}, "steps is 0"),
        ({"steps": 1.5}, "steps is 1.5"),
        ({"steps": True}, "steps is True"),
        ({"lr": -1.0}, "lr is -1.0"),
        ({"lr": "fast"}, "lr is 'fast'"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"warmup": 1.5}, "warmup is 1.5"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**31}, "seed is"),
        ({"dtype": "bfloat"}, "did you mean 'bfloat16'"),
        ({"batch_size": 8, "accumulate": 3}, "accumulate 3 does not divide batch_size 8"),
        ({"task_options": 5}, "task_options is 5"),
        ({"tensorboard": "yes"}, "tensorboard is 'yes'"),
        ({"min_lr": 1.0}, "min_lr is 1.0"),
    ],
)
def test_bad_values_are_named(changes, words):
    with pytest.raises(InputError, match=words):
        RunConfig(**changes)


def test_unknown_setting_names_the_file_and_the_nearest(tmp_path):
    file = tmp_path / "my.yaml"
    file.write_text("learning_rat: 3\nlearning_rate: 3\n")
    with pytest.raises(InputError, match=r"my\.yaml: unknown setting 'learning_rat'"):
        RunConfig.from_file(file)
    with pytest.raises(InputError, match="did you mean 'batch_size'"):
        RunConfig.from_dict({"batchsize": 3})


@pytest.mark.parametrize("text", ["- a\n- b\n", "just words", "a: [", "\x00"])
def test_file_that_is_no_config(tmp_path, text):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(RunError, match=r"config\.yaml"):
        RunConfig.from_file(file)
    with pytest.raises(RunError, match="cannot read"):
        RunConfig.from_file(tmp_path / "absent.yaml")


def test_resume_keeps_what_defines_the_run(tmp_path):
    config = tiny_config()
    assert config.for_resume({"save_every": 7, "lr": config.lr}, tmp_path).save_every == 7
    with pytest.raises(RunError, match=r"was started with lr = 0\.01, not 1"):
        config.for_resume({"lr": 1.0}, tmp_path)
    with pytest.raises(RunError, match="steps"):
        config.for_resume({"steps": config.steps + 1}, tmp_path)


def test_every_setting_survives_as_plain_values():
    values = RunConfig().to_dict()
    assert set(values) == {item.name for item in dataclasses.fields(RunConfig)}
    assert yaml.safe_load(yaml.safe_dump(values)) == values
