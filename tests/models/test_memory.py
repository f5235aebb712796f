from __future__ import annotations

import pytest

from tests.training.tiny import tiny_config
from traformer.errors import InputError
from traformer.models.from_run import build_model
from traformer.models.memory import available_memory, check_fits, memory_need
from traformer.tasks import build_task


def need_of(training=True, length=64, **changes):
    config = tiny_config(**changes)
    task = build_task(config.task, config.task_options)
    from traformer.models.from_run import build_model_config

    return memory_need(build_model_config(config, task), length, training=training)


@pytest.mark.parametrize("preset", ["tiny", "mini"])
def test_weights_are_counted(preset):
    config = tiny_config(preset=preset, model_options={})
    task = build_task(config.task, config.task_options)
    model = build_model(config, task)
    count = sum(parameter.numel() for parameter in model.parameters())
    fixed = memory_need(model.config, 1, training=False).fixed
    assert fixed == pytest.approx(4 * count, rel=0.05)
    assert memory_need(model.config, 1, training=True).fixed == 4 * fixed  # gradient and two moments


def test_grows_with_length_linearly_unless_a_square_is_written():
    for attention, factor in (("tra", 2), ("rope", 2), ("cope", 4)):
        options = {"attention_dropout": 0.0}
        short, long = (
            need_of(length=length, attention=attention, model_options=options).per_sequence for length in (2**16, 2**17)
        )
        assert long / short == pytest.approx(factor, rel=0.05), attention
    # torch's fused attention has no dropout on the CPU: with it, RoPE writes a square too.
    fused = need_of(length=2**16, attention="rope", model_options={"attention_dropout": 0.0})
    assert need_of(length=2**16, attention="rope").per_sequence > 10 * fused.per_sequence
    assert need_of(training=False).per_sequence < need_of(training=True).per_sequence


def test_sentence_names_both_sizes():
    check_fits(10, 100, "it", "do less")
    with pytest.raises(InputError, match=r"it needs about 3\.0 GiB of memory and 2\.0 GiB are free.*do less"):
        check_fits(3 * 2**30, 2 * 2**30, "it", "do less")
    assert available_memory() > 2**20
