"""Gains on the same tokens: sums by range, what a hypothesis asks, and the frame that makes the tokens the same."""

from __future__ import annotations

import pytest

from traformer.experiments import text_gain
from traformer.experiments.protocol import FAILS, HOLDS, UNDECIDED, Protocol
from traformer.experiments.text_gain import BEYOND, COPIES, FAR, HYPOTHESES, LONGEST, PROTOCOL, SHOWN, Gain, gains
from traformer.runs.measurements import Measurement

(ARM,) = PROTOCOL.waves[0][1]
METRICS = {"place": "loss_by_place", "distance": "loss_by_recurrence"}


def loss(value, counted, length, **at):
    (kind,) = set(at) - {"to"}
    return Measurement(
        task="text", split="any", length=length, metric=METRICS[kind],
        value=value, low=None, high=None, examples=32, seed=110, attention="x", step=1, train_length=512,
        counted=counted, at=at,
    )  # fmt: skip


def test_a_gain_is_a_difference_on_the_same_tokens(monkeypatch, tmp_path):
    def rows(long, sliding):
        for length, (near, far) in ((LONGEST, long), (512, sliding)):
            yield loss(9.0, 100, length, place=256, to=511)  # within the trained window: in no range
            yield loss(near, 10, length, place=512, to=1023)
            yield loss(far, 30, length, place=8192, to=LONGEST - 1)
            yield loss(near, 5, length, distance=1024, to=2047)

    def measured(protocol, out):
        return (("lr0.003", ARM, 110, one) for one in rows((2.0, 1.0), (2.2, 1.4)))

    monkeypatch.setattr(Protocol, "measured", measured)
    found = {where: by_seed for (_, where), by_seed in gains(tmp_path).items()}
    assert found[BEYOND] == {110: pytest.approx((0.2 * 10 + 0.4 * 30) / 40)}
    assert found[FAR] == {110: pytest.approx(0.4)} and found[COPIES] == {110: pytest.approx(0.2)}
    assert found[SHOWN["place"][0]] == {110: pytest.approx(0.2)} and SHOWN["place"][1] not in found
    table = text_gain.table(gains(tmp_path))
    assert "| gain in nats, place in the window | 512–1,023 |" in table and f"| `{ARM.name}` | +0.200" in table
    for kind in SHOWN:
        assert "<svg" in text_gain.picture(gains(tmp_path), kind)


@pytest.mark.parametrize(
    "own,other,outcome",
    [
        ((0.10, 0.11, 0.12, 0.11, 0.10), None, HOLDS),
        ((-0.10, -0.11, -0.12, -0.11, -0.10), None, FAILS),
        ((0.10, -0.11, 0.12, -0.11, 0.10), None, UNDECIDED),
        ((0.10, 0.11, 0.12, 0.11, 0.10), (0.05, 0.06, 0.07, 0.06, 0.05), HOLDS),
        ((0.10, 0.11, 0.12, 0.11), None, UNDECIDED),  # a seed is missing
    ],
)
def test_what_a_hypothesis_asks(own, other, outcome):
    found = {("a", FAR): dict(enumerate(own)), ("a", BEYOND): dict(enumerate(other or ()))}
    verdict = Gain("G", "gains", "a", FAR, BEYOND if other else None).judge(found, 5)
    assert verdict.outcome == outcome and ("4 of 5 seeds" in verdict.numbers) == (len(own) == 4)


def test_every_arm_is_read_twice_in_one_frame():
    for cell in PROTOCOL.cells():
        assert (cell.lengths, cell.stride, cell.frame) == (str(LONGEST), 64, LONGEST)
        long, sliding = cell.commands("RUN")[1:]
        assert f"--frame {LONGEST}" in long and f"--stride 64 --frame {LONGEST}" in sliding
        assert type(cell).from_dict(cell.to_dict()) == cell
    assert [hypothesis.name for hypothesis in HYPOTHESES] == [f"G{number}" for number in range(1, 13)]
    assert {hypothesis.arm for hypothesis in HYPOTHESES} == {arm.name for _, wave in PROTOCOL.waves for arm in wave}
