from __future__ import annotations

import itertools

import pytest

from tests.training.tiny import without_dropout
from traformer.models.from_run import build_model, load_run
from traformer.tasks import build_task
from traformer.training.loop import train
from traformer.training.optimizer import learning_rate


def rates(steps, warmup, minimum=0.0):
    return [learning_rate(s, steps=steps, peak=2.0, warmup=warmup, minimum=minimum) for s in range(steps)]


def test_warm_up_is_linear_and_takes_five_per_cent():
    values = rates(200, 0.05)
    assert values[:10] == pytest.approx([0.2 * (k + 1) for k in range(10)])
    assert max(values) == values[9] == pytest.approx(2.0)


def test_cosine_falls_to_the_minimum():
    values = rates(1000, 0.05, minimum=0.1)
    falling = values[50:]
    assert all(a >= b for a, b in itertools.pairwise(falling))
    assert falling[len(falling) // 2] == pytest.approx(1.05, abs=0.01)
    assert falling[-1] == pytest.approx(0.1, abs=1e-4)


def test_no_warm_up_and_one_step():
    assert rates(4, 0.0)[0] == 2.0
    assert rates(1, 0.05) == [2.0]
    assert all(value >= 0 for value in rates(3, 1.0))


@pytest.mark.parametrize("attention", ["tra_temperature", "tra_plus"])
def test_temperatures_move_ten_times_as_far_in_a_step(tmp_path, attention):
    """AdamW's first step moves a parameter by its own rate, if its gradient is well above AdamW's epsilon."""
    config = without_dropout(attention=attention, steps=1, warmup=0.0, lr=1e-3, weight_decay=0.0)
    task = build_task(config.task, config.task_options)
    before = build_model(config, task).state_dict()
    train(config, tmp_path / "run", quiet=True)
    after = load_run(tmp_path / "run", device="cpu")[0].state_dict()
    moved = {name: (after[name] - before[name]).abs() for name in before}
    temperatures = [name for name in moved if name.endswith("temperature")]
    assert temperatures
    for name, distance in moved.items():
        rate = 10 * config.lr if name in temperatures else config.lr
        assert distance.max() <= rate * 1.001, name
        if name in temperatures:
            assert distance.max() > 0.9 * rate, name  # one head's gradient may be near 0
