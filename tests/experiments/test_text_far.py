"""What a long window gains at each distance of a recurrence, and the verdicts on it."""

from __future__ import annotations

import pytest

from traformer.experiments import text_far
from traformer.experiments.protocol import FAILS, HOLDS, UNDECIDED, Protocol
from traformer.experiments.text_far import (
    ALL,
    HYPOTHESES,
    LONG,
    NEAR_FAR,
    PROTOCOL,
    SHORT,
    Gain,
    far_beyond,
    gains,
    just_beyond,
)
from traformer.runs.measurements import Measurement

KEY, RIVAL = ("text", "a"), ("text", "b")


def loss(value, counted, *, split="validation", length=16_384, **at):
    return Measurement(
        task="text", split=split, length=length, metric="loss_by_recurrence" if "distance" in at else "loss_by_place",
        value=value, low=None, high=None, examples=32, seed=80, attention="x", step=1, train_length=512,
        counted=counted, at=at,
    )  # fmt: skip


def test_gain_is_the_loss_in_sliding_windows_less_that_in_long_ones(monkeypatch, tmp_path):
    sliding = {"split": "validation stride 64", "length": 512}
    rows = [
        loss(2.0, 10, distance=512, to=1023), loss(1.0, 30, distance=1024, to=2047),  # 1.25 on average
        loss(2.5, 10, distance=512, to=1023, **sliding), loss(1.1, 30, distance=1024, to=2047, **sliding),  # 1.45
        loss(4.0, 10, place=1, to=1), loss(2.0, 90, place=2, to=3),  # 2.2 over all tokens
        loss(2.1, 100, place=256, to=511, **sliding),
        loss(9.0, 100, place=1, to=511, length=512),
        loss(9.0, 9, place=1, to=1, split="validation stride 8", length=512),
    ]  # fmt: skip
    monkeypatch.setattr(Protocol, "measured", lambda protocol, out: ((SHORT, NEAR_FAR, 80, one) for one in rows))
    found = {distances: by_seed for (_, distances), by_seed in gains(tmp_path).items()}
    assert found[just_beyond(SHORT)] == {80: pytest.approx(0.2)}
    assert found[512, 1023] == {80: pytest.approx(0.5)} and found[1024, 2047] == {80: pytest.approx(0.1)}
    assert found[ALL] == {80: pytest.approx(-0.1)}
    assert far_beyond(SHORT) not in found and (2048, 4095) not in found  # nothing was measured there
    shown = text_far.table(gains(tmp_path))
    assert "| `near_far` |  | +0.500 (+0.500 to +0.500) | +0.100" in shown and shown.endswith("| 1 |\n")


@pytest.mark.parametrize(
    "own,rival,outcome",
    [
        ((0.18, 0.2, 0.22), None, HOLDS),
        ((-0.18, -0.2, -0.22), None, FAILS),
        ((-0.2, 0.1, 0.2), None, UNDECIDED),
        ((0.5, 0.6, 0.7), (0.1, 0.2, 0.3), HOLDS),
        ((0.1, 0.2, 0.3), (0.5, 0.6, 0.7), FAILS),
        ((0.1, 0.2, 0.3), (0.1, 0.2), UNDECIDED),  # a seed is missing
    ],
)
def test_a_gain_must_be_one_over_the_whole_interval(own, rival, outcome):
    found = {(KEY, (1, 2)): dict(enumerate(own))}
    if rival:
        found[RIVAL, (1, 2)] = dict(enumerate(rival))
    verdict = Gain("F", "gains", KEY, (1, 2), RIVAL if rival else None).judge(found, 3)
    assert verdict.outcome == outcome
    assert ("2 of 3 seeds" in verdict.numbers) == (rival == (0.1, 0.2))
    assert Gain("F", "gains", KEY, (1, 2)).judge({}, 3).outcome == UNDECIDED


def test_the_arms_differ_from_the_main_one_in_one_thing():
    cells = {cell.name: cell.config for cell in _all_cells()}
    assert len(cells) == 25 and len({config.seed for config in cells.values()}) == 5
    main = cells["text-near_far-seed80"]
    upper = main.attention_options["tra_straight_through"]
    assert cells["text-sharpening-seed80"].attention_options["tra_straight_through"] == {**upper, "sharpening": 0.0}
    assert cells["text-growing-seed80"].attention_options["tra_straight_through"] == {**upper, "threshold_growth": 0.25}
    long = cells["long-near_far-seed80"]
    assert long.attention_options == main.attention_options and long.lr == main.lr and long.steps == main.steps
    assert long.task_options["length"] * long.batch_size == main.task_options["length"] * main.batch_size
    names = [hypothesis.name for hypothesis in HYPOTHESES]
    assert names == [f"F{number}" for number in range(1, 11)]
    arms = {(setting, arm.name) for setting, wave in PROTOCOL.waves for arm in wave}
    assert {hypothesis.arm for hypothesis in HYPOTHESES} == arms and far_beyond(LONG) == (8192, 16383)


def _all_cells():
    return [
        cell
        for setting, wave in PROTOCOL.waves
        for arm in wave
        for cell in PROTOCOL.table_cells(setting, arm, PROTOCOL.settings[setting].rate)
    ]
