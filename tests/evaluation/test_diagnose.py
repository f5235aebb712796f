"""The diagnosis against plain loops, on maps made by hand, and on a small trained run of several attentions."""

from __future__ import annotations

import json
import math

import pytest
import torch

from traformer.cli import main
from traformer.errors import InputError, RunError
from traformer.evaluation.diagnose import _add_lifted, _add_residue, _HeadTotals, diagnose_run, measure
from traformer.evaluation.heads import chosen_heads, head_of, head_summaries
from traformer.models import TraformerConfig, TraformerForCausalLM
from traformer.tasks import Copy, FlipFlop, Induction
from traformer.tasks.base import Split
from traformer.training import RunConfig, train


def test_lifted_pairs_against_loops():
    generator = torch.Generator().manual_seed(0)
    heads, length, places = 2, 21, torch.tensor([3, 11, 20])
    scores = torch.randn(heads, 3, length, generator=generator)
    weights = torch.rand(heads, 3, length, generator=generator)
    weights[0, 1, ::4] = 0.0
    totals = _HeadTotals((1, heads))
    _add_lifted(totals, 0, weights, scores, places)
    by_distance: dict[int, list[float]] = {}
    for h in range(heads):
        pairs = lifted = gain = 0.0
        for row, i in enumerate(places.tolist()):
            for j in range(i + 1):
                for other in range(i + 1):
                    if not (scores[h, row, j] < 0 < scores[h, row, other]):
                        continue
                    sums = by_distance.setdefault(int(math.log2(max(1, i - j))), [0.0, 0.0, 0.0])
                    pairs, sums[0] = pairs + 1, sums[0] + 1
                    a, b = (max(1e-30, float(weights[h, row, key])) for key in (j, other))
                    if a > b:
                        ratio = math.log(a) - math.log(b)
                        lifted, gain = lifted + 1, gain + ratio
                        sums[1], sums[2] = sums[1] + 1, sums[2] + ratio
        assert totals.pairs[0, h] == pairs and totals.lifted[0, h] == lifted
        assert totals.log_ratio[0, h].item() == pytest.approx(gain, rel=1e-5)
    for number, sums in by_distance.items():
        assert totals.by_distance[number] == pytest.approx(sums, rel=1e-5)


def test_residue_of_maps_made_by_hand():
    weights = torch.tensor([[[0.1, 0.2, 0.7, 0.0]], [[0.0, 1.0, 0.0, 0.0]], [[0.5, -0.5, 0.0, 0.0]]])  # [H, R, T]
    relevant = torch.tensor([[False, True, False, False]])
    totals = _HeadTotals((1, 3))
    _add_residue(totals, 0, weights, relevant)
    torch.testing.assert_close(totals.source[0], torch.tensor([0.2, 1.0, 0.5]).double())
    torch.testing.assert_close(totals.residue[0], torch.tensor([0.8, 0.0, 0.5]).double())


def small_model(attention: str, task) -> TraformerForCausalLM:
    torch.manual_seed(0)
    config = TraformerConfig(
        attention=attention, vocab_size=task.vocab_size, hidden_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    return TraformerForCausalLM(config).eval()


@pytest.mark.parametrize("task", [FlipFlop(length=24), Copy(max_length=9, min_length=9), Induction(max_length=12)])
def test_what_holds_by_construction(task):
    """TRA never weighs a negative key and NoPE ranks keys by content: no pair is lifted. ALiBi lifts near keys."""
    split = Split("x", "24", task)
    for attention in ("tra", "nope", "tra_threshold_only", "ssmax"):
        options = {"position": "none"} if attention == "ssmax" else {}
        torch.manual_seed(0)
        config = TraformerConfig(
            attention=attention, attention_options=options, vocab_size=task.vocab_size, hidden_size=32,
            num_hidden_layers=2, num_attention_heads=2,
        )  # fmt: skip
        totals = measure(TraformerForCausalLM(config).eval(), split, 4, 8, seed=5)
        assert totals.queries > 0 and totals.pairs.sum() > 0
        assert totals.lifted.sum() == 0, attention
        mass = (totals.source + totals.residue) / totals.queries
        assert mass.max() < 1 + 1e-5
    totals = measure(small_model("alibi", task), split, 4, 8, seed=5)
    assert totals.lifted.sum() > 0
    torch.testing.assert_close((totals.source + totals.residue) / totals.queries, torch.ones(2, 2).double())


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folders = []
    for attention in ("tra", "alibi", "lstm"):
        folder = tmp_path_factory.mktemp("runs") / attention
        config = RunConfig(
            attention=attention, task_options={"length": 16}, preset="tiny", model_options={"hidden_size": 32},
            steps=4, save_every=2, batch_size=4, threads=1,
        )  # fmt: skip
        train(config, folder, quiet=True)
        folders.append(folder)
    return folders


def test_measurements_and_summary(runs):
    found = diagnose_run(runs[1], "16,64", examples=3, queries=4)
    residue = [one for one in found if one.metric == "residue"]
    assert {(one.length, *head_of(one)) for one in residue} == {
        (length, layer, head) for length in (16, 64) for layer in (0, 1) for head in (0, 1)
    }
    reading, marking = chosen_heads(found)
    best = max((one for one in found if one.metric == "source_weight" and one.length == 16), key=lambda one: one.value)
    assert reading == head_of(best) and marking[0] <= reading[0]
    beyond = [one for one in found if one.metric == "lifted_by_distance" and one.at["distance"] >= 16]
    assert beyond and all(one.length == 64 and one.protocol["train_tokens"] == 16 for one in beyond)
    short = head_summaries(found)
    assert [row.length for row in short] == [16, 64] and {row.reading_head for row in short} == {reading}
    of_heads = [one for one in found if one.metric == "lifted_pairs" and one.length == 64 and one.at]
    pairs = sum(one.counted for one in of_heads)
    lifted = sum(one.counted * one.value for one in of_heads)
    assert short[1].lifted_pairs == pytest.approx(lifted / pairs)


def test_what_is_measured_is_not_measured_again(runs, monkeypatch):
    first = diagnose_run(runs[0], "16", examples=2, queries=3)
    monkeypatch.setattr("traformer.evaluation.diagnose.measure", lambda *rest: pytest.fail("tried"))
    assert diagnose_run(runs[0], "16", examples=2, queries=3) == first


def test_a_length_beyond_memory_is_said_before_anything_is_measured(runs, monkeypatch):
    monkeypatch.setattr("traformer.evaluation.diagnose.measure", lambda *rest: pytest.fail("tried"))
    with pytest.raises(InputError, match=r"diagnosing a sequence of 1048576 tokens, .* leave that length out"):
        diagnose_run(runs[0], "16,1m")


def test_command(runs, tmp_path, capsys):
    out = tmp_path / "out"
    tra, alibi, lstm = map(str, runs)
    arguments = ["diagnose", tra, alibi, "--lengths", "16,32", "--examples", "2", "--out", str(out)]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "alibi" in printed and "residue" in printed
    rows = json.loads((out / "diagnosis.json").read_text())
    assert {(row["run"], row["attention"]) for row in rows} == {(tra, "tra"), (alibi, "alibi")}
    for name in ("residue.png", "upweighting.png"):
        assert (out / name).read_bytes()[:4] == b"\x89PNG"
    assert main(["diagnose", lstm]) == 2
    assert "weighs no keys" in capsys.readouterr().err


def test_bad_arguments(runs):
    with pytest.raises(InputError, match="examples is 0"):
        diagnose_run(runs[0], examples=0)
    with pytest.raises(InputError, match='not "all" or whole numbers'):
        diagnose_run(runs[0], steps="last")
    with pytest.raises(RunError, match="no checkpoint of step 3; it has: 2, 4"):
        diagnose_run(runs[0], steps="3")


@torch.no_grad()
@pytest.mark.parametrize("attention", ["tra", "alibi"])
def test_marks_kept_share_and_decay_against_loops(attention):
    """What a head does at the source, by the layer's own maps, one query at a time."""
    task = Copy(max_length=7, min_length=7)
    model, seed = small_model(attention, task), 5
    totals = measure(model, Split("x", "7", task), 1, 100, seed=seed)
    batch = task.examples(seed=seed, start=0, count=1)
    maps = model(batch.input_ids, output_attentions=True, use_cache=False).attentions
    inputs = []
    hooks = [
        block.self_attn.register_forward_hook(lambda layer, args, out: inputs.append(args[0]))
        for block in model.model.layers
    ]
    model(batch.input_ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    answers = [t for t in range(batch.input_ids.shape[1]) if batch.answers[0, t] and batch.sources[0, t] >= 0]
    for layer, block in enumerate(model.model.layers):
        q, k, _ = block.self_attn.project(inputs[layer])
        for head in range(2):
            marks, positive, decay = 0.0, 0.0, 0.0
            for answer in answers:
                query, source = answer - 1, int(batch.sources[0, answer])
                marks += float(maps[layer][0, head, source, source - 1])
                positive += sum(float(q[0, head, query] @ k[0, head, j]) > 0 for j in range(query + 1)) / (query + 1)
                if attention == "tra":
                    decay += float(block.self_attn.log_decay(inputs[layer])[0, head, query].exp())
            assert totals.marks[layer, head].item() == pytest.approx(marks, rel=1e-5)
            assert totals.positive[layer, head].item() == pytest.approx(positive, rel=1e-9)
            if attention == "tra":
                assert totals.decay[layer, head].item() == pytest.approx(decay, rel=1e-5)
            else:
                assert totals.decay[layer, head].isnan()


def test_several_steps_show_when_heads_form(runs, tmp_path, capsys):
    tra, alibi, _ = map(str, runs)
    out = tmp_path / "out"
    assert (
        main(["diagnose", tra, alibi, "--steps", "all", "--lengths", "16", "--examples", "2", "--out", str(out)]) == 0
    )
    assert "marking head" in capsys.readouterr().out
    assert (out / "formation.png").read_bytes()[:4] == b"\x89PNG"
    for run, attention in ((tra, "tra"), (alibi, "alibi")):
        rows = head_summaries(diagnose_run(run, "16", examples=2, steps="all"))
        assert [(row.attention, row.step) for row in rows] == [(attention, 2), (attention, 4)]
        assert len({row.reading_head for row in rows}) == 1  # followed through the steps
        assert {row.gate_decay is None for row in rows} == {attention == "alibi"}
