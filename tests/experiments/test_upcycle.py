"""`tra reproduce upcycle`: all its steps on a tiny random Llama, that nothing is done twice, and its verdicts."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.training.tiny_llama import text_folder, tiny_llama
from traformer.cli import main
from traformer.experiments.protocol import FAILS, HOLDS, UNDECIDED
from traformer.experiments.upcycle import ARMS, HYBRID, LAYERS, PLANS, SOURCE, verdicts
from traformer.experiments.upcycle_run import set_rotary
from traformer.runs.measurements import Measurement
from traformer.runs.metrics import METRICS

PLAN = replace(PLANS["smoke"], windows=(10, 20, 40), recall_lengths=(40,))


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    root = tmp_path_factory.mktemp("upcycle")
    return {"llama": tiny_llama(root / "llama"), "text": text_folder(root / "text"), "out": root / "out"}


def command(places, *more: str) -> list[str]:
    return [
        "reproduce", "upcycle", "--scale", "smoke", "--model", str(places["llama"]), "--data", str(places["text"]),
        "--out", str(places["out"]), "--threads", "1", *more,
    ]  # fmt: skip


def test_every_step_works_and_nothing_is_done_twice(places, capsys):
    assert main(command(places)) == 0
    out = places["out"]
    rows = json.loads((out / "results.json").read_text())
    assert {row["arm"] for row in rows} == set(ARMS)
    assert {row["metric"] for row in rows} <= set(METRICS)
    plan = PLANS["smoke"]
    for arm in ARMS:
        own = [Measurement.from_row(row) for row in rows if row["arm"] == arm]
        assert {one.size for one in own if one.metric == "perplexity"} == set(plan.windows)
        assert {one.size for one in own if one.metric == "recall_at_depth"} == set(plan.recall_lengths)
        assert all(one.value is not None and math.isfinite(one.value) for one in own)
    table = (out / "table.md").read_text()
    assert all(label in table for label in ARMS.values()) and "Loss in nats by place" in table
    assert (out / "recall.png").stat().st_size > 10_000
    chosen = json.loads((out / "recall_by_layer.json").read_text())["chosen"]
    pattern = (out / "attention.txt").read_text().strip().split(",")
    assert [layer for layer, name in enumerate(pattern) if name == "tra_straight_through"] == chosen
    curve = (out / "tuning.csv").read_text().splitlines()
    assert len(curve) == 1 + plan.layer_steps // plan.save_every + plan.logit_steps // plan.save_every
    targets = [f"{name}, {arm}" for arm in (HYBRID, LAYERS) for name in ("within", "beyond", "recall")]
    assert [one["name"] for one in json.loads((out / "targets.json").read_text())] == targets
    kept = (out / "results.json").read_bytes()
    capsys.readouterr()
    assert main(command(places)) == 0
    assert "measuring" not in capsys.readouterr().err
    assert (out / "results.json").read_bytes() == kept


def test_another_pattern_needs_another_folder(places, tmp_path, capsys):
    here = {**places, "out": tmp_path / "out"}
    pure = command(here, "--attention", "tra_straight_through", "--arms", "hybrid_layers", "--no-tuning")
    assert main(pure) == 0
    config = AutoModelForCausalLM.from_pretrained(here["out"] / "hybrid").config
    assert set(config.attention) == {"tra_variant"} or config.attention == "tra_variant"
    capsys.readouterr()
    assert main(command(here, "--attention", "rope,tra_straight_through", "--no-tuning")) != 0
    error = capsys.readouterr().err
    assert "holds the experiment with --attention tra_straight_through; give --out another folder" in error


def test_one_arm_and_no_tuning(places, tmp_path):
    here = {**places, "out": tmp_path / "out"}
    assert main(command(here, "--arms", "source,hybrid", "--no-tuning")) == 0
    rows = json.loads((here["out"] / "results.json").read_text())
    assert {row["arm"] for row in rows} == {"source"}  # there is no tuned hybrid yet
    assert {one["outcome"] for one in json.loads((here["out"] / "targets.json").read_text())} == {UNDECIDED}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--scale", "paper"], "upcycle has no scale 'paper'"),
        (["--arms", "sorce"], "did you mean 'source'"),
        (["--seeds", "2"], "--seeds is for tables of several runs"),
        (["--model", ""], "needs --model"),
    ],
)
def test_mistakes_are_one_sentence(more, words, places, capsys):
    assert main(command(places, *more)) == 2
    assert words in capsys.readouterr().err
    assert main(["reproduce", "copy", "--scale", "smoke", "--model", "x"]) == 2


def test_verdicts():
    good = {(SOURCE, 10): 5.0, (SOURCE, 20): 4.0, (HYBRID, 10): 5.5, (HYBRID, 20): 4.3, (HYBRID, 40): 4.2}
    recall = {(SOURCE, 40): 0.1, (HYBRID, 40): 0.2}

    def outcomes(perplexity, recall=recall):
        judged = verdicts(perplexity, recall, PLAN, trained=20)
        assert [one.outcome for one in judged[3:]] == [UNDECIDED] * 3  # stage 1 alone was not measured
        return [one.outcome for one in judged[:3]]

    assert outcomes(good) == [HOLDS, HOLDS, HOLDS]
    assert outcomes({**good, (HYBRID, 10): 5.6}) == [FAILS, HOLDS, HOLDS]
    assert outcomes({**good, (HYBRID, 40): 4.31}) == [HOLDS, FAILS, HOLDS]
    assert outcomes(good, {**recall, (HYBRID, 40): 0.1}) == [HOLDS, HOLDS, FAILS]
    assert outcomes({}, {}) == [UNDECIDED] * 3


@pytest.mark.parametrize("kind", ["linear", "ntk"])
def test_scaled_positions(kind, places):
    """Interpolation is transformers' own; NTK slows the slowest channel as much, and the fastest not at all."""
    model = AutoModelForCausalLM.from_pretrained(places["llama"])
    before = model.model.rotary_emb.inv_freq.clone()
    set_rotary(model, **({"factor": 4.0} if kind == "linear" else {"ntk": 4.0}))
    after = model.model.rotary_emb.inv_freq
    if kind == "linear":
        parameters = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}
        config = LlamaConfig(hidden_size=32, num_attention_heads=4, rope_parameters=parameters)
        torch.testing.assert_close(after, LlamaRotaryEmbedding(config).inv_freq)
    else:
        torch.testing.assert_close(after[-1], before[-1] / 4)
        assert after[0] == before[0]
