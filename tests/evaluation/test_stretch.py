from __future__ import annotations

import json

import pytest
import torch

from tests.training.tiny import tiny_config
from traformer.cli import main
from traformer.errors import InputError, RunError
from traformer.evaluation import stretch as module
from traformer.evaluation.by_length import measure as measure_whole
from traformer.evaluation.stretch import StretchRun, read_rows, stretch
from traformer.layers import ThresholdRelativeAttention
from traformer.models import TraformerForCausalLM
from traformer.models.from_run import load_run
from traformer.reports.stretch import short_length, stretch_markdown
from traformer.tasks.base import Task
from traformer.training.loop import train


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A TRA and a RoPE run, hardly trained: what they get wrong is all the more to compare."""
    folder = tmp_path_factory.mktemp("runs")
    for attention in ("tra", "rope"):
        train(tiny_config(attention=attention, steps=4), folder / attention, quiet=True)
    return folder


def opened(path, time_limit=None) -> StretchRun:
    model, task, config, step = load_run(path, device="cpu")
    return StretchRun(str(path), model, task, config, step, time_limit)


@pytest.mark.parametrize("attention", ["tra", "rope"])
@pytest.mark.parametrize("step", [7, 64, 200])
def test_chunks_give_what_one_forward_gives(runs, attention, step):
    run = opened(runs / attention)
    for split in run.task.test_splits("96"):
        seed = Task.test_seed(3)
        whole = measure_whole(run.model, split, 5, seed, 5)[""]
        pieces = module.measure(run, split, 5, seed, 200, step, lambda tokens: None)
        assert pieces.tally == whole
        assert pieces.tokens == 5 * 96 and pieces.seconds > 0


def test_the_head_runs_on_scored_places_alone(runs, monkeypatch):
    run = opened(runs / "tra")
    split = run.task.test_splits("64")[1]
    seen = []
    run.model.lm_head.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape[0]))
    module.measure(run, split, 1, 9, 16, 16, lambda tokens: None)
    assert sum(seen) == int(split.task.examples(9, 0, 1).answers.sum())


def test_the_cache_has_room_for_the_sequence_and_no_more(runs):
    run = opened(runs / "tra")
    caches = []
    new_cache = run.model.base_model.new_cache
    run.model.base_model.new_cache = lambda: caches.append(new_cache()) or caches[-1]
    module.measure(run, run.task.test_splits("100")[0], 1, 9, 16, 16, lambda tokens: None)
    assert [layer.capacity for layer in caches[0].layers] == [100]
    assert caches[0].get_seq_length() == 100


def test_keys_read_are_those_of_the_last_chunk(runs):
    """TRA: what the kernel says it read. RoPE: everything before the query."""
    run = opened(runs / "tra")
    layer = next(m for m in run.model.modules() if isinstance(m, ThresholdRelativeAttention))
    layer.option["tolerance"] = 0.0  # read every key
    result = module.measure(run, run.task.test_splits("64")[0], 1, 9, 16, 16, lambda tokens: None)
    assert result.read_mean == sum(range(49, 65)) / 16 and result.read_most == 64
    assert 0 < result.kept_mean < result.read_mean
    assert "attend" not in vars(layer)
    with torch.no_grad():
        layer.decay_proj.bias.fill_(-30.0)  # the nearest kept key takes all the weight
    layer.option["tolerance"] = 2.0**-24
    long = module.measure(run, run.task.test_splits("4096")[0], 1, 9, 1024, 1024, lambda tokens: None)
    assert long.read_mean < 1000
    rope = opened(runs / "rope")
    result = module.measure(rope, rope.task.test_splits("64")[0], 1, 9, 16, 16, lambda tokens: None)
    assert result.read_mean == sum(range(49, 65)) / 16 and result.read_most == 64 and result.kept_mean is None


def test_rows(runs, tmp_path):
    rows = stretch([runs / "tra", runs / "rope"], "32,1k", 3, out=tmp_path, chunk=256, time_limit=60, device="cpu")
    assert [(row["length"], row["split"], row["attention"]) for row in rows] == [
        (length, split, attention)
        for length in (32, 1024)
        for split in ("iid", "sparse", "dense")
        for attention in ("tra", "rope")
    ]
    for row in rows:
        assert row["status"] == "measured" and row["examples"] == 3 and row["train_length"] == 12
        assert row["errors"] / row["answers"] == row["error_per_answer"] <= row["error_upper_bound"] <= 1
        assert row["microseconds_per_token"] > 0 and row["cpu_microseconds_per_token"] > 0
        assert row["keys_read_mean"] <= row["keys_read_most"] <= row["length"]
    assert len(read_rows(tmp_path / "stretch.json")) == 12


def test_what_is_measured_is_not_measured_again(runs, tmp_path, monkeypatch):
    settings = {"out": tmp_path, "chunk": 64, "time_limit": 60, "device": "cpu", "splits": ["iid"]}
    both = [runs / "tra", runs / "rope"]
    first = stretch(both, "32", 2, **settings)
    calls = []
    original = module.measure
    monkeypatch.setattr(module, "measure", lambda run, *rest: calls.append(run.name) or original(run, *rest))
    assert stretch(both, "32", 2, **settings) == first and calls == []
    stretch(both, "32,64", 2, **settings)
    assert len(calls) == 2
    stretch(both, "32", 3, **settings)  # other examples: other rows
    assert len(calls) == 4 and len(read_rows(tmp_path / "stretch.json")) == 4
    stretch(both, "32", 3, again=True, **settings)
    assert len(calls) == 6


def test_a_peer_out_of_time_stops_and_says_so(runs, tmp_path, monkeypatch):
    settings = {"out": tmp_path, "chunk": 64, "device": "cpu", "splits": ["iid"]}
    rows = stretch([runs / "tra", runs / "rope"], "64,256,1k", 2, time_limit=1e-9, **settings)
    assert [row["status"] for row in rows if row["attention"] == "tra"] == ["measured"] * 3
    peers = [row for row in rows if row["attention"] == "rope"]
    assert [row["status"] for row in peers] == ["out of time", "not tried", "not tried"]
    assert peers[0]["reason"] == "stopped after 1e-09 s at 64 of 128 tokens"
    assert peers[1]["reason"] == "out of time at 64 already" and "errors" not in peers[0]
    # With no more time there is nothing to try; with more there is.
    monkeypatch.setattr(module, "measure", lambda *rest: pytest.fail("tried"))
    assert stretch([runs / "tra", runs / "rope"], "64,256,1k", 2, time_limit=1e-9, **settings) == rows
    monkeypatch.undo()
    rows = stretch([runs / "tra", runs / "rope"], "64,256,1k", 2, time_limit=60, **settings)
    assert {row["status"] for row in rows} == {"measured"}


def test_interrupting_keeps_what_was_measured(runs, tmp_path, monkeypatch, capsys):
    original = module.measure

    def interrupted(run, split, *rest):
        if split.name == "dense":
            raise KeyboardInterrupt
        return original(run, split, *rest)

    monkeypatch.setattr(module, "measure", interrupted)
    assert main(["stretch", str(runs / "tra"), "--lengths", "32", "--examples", "2", "--out", str(tmp_path)]) == 130
    captured = capsys.readouterr()
    assert "this was measured before" in captured.err and "sparse" in captured.out
    assert {row["split"] for row in read_rows(tmp_path / "stretch.json")} == {"iid", "sparse"}


def test_the_command(runs, tmp_path, capsys):
    arguments = ["stretch", str(runs / "tra"), str(runs / "rope"), "--lengths", "32,64", "1k", "--chunk", "64"]
    assert main([*arguments, "--examples", "2", "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "Flip-flop, trained to 12" in out and "1,024" in out and "RoPE" in out
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "stretch.json",
        "stretch.md",
        "stretch.png",
        "stretch.svg",
    }
    text = (tmp_path / "out" / "stretch.md").read_text()
    assert text.count("\n| TRA |") == text.count("\n| RoPE |") == 9


def test_needles_have_an_accuracy_and_a_chance(tmp_path):
    train(tiny_config(task="induction", task_options={"max_length": 6}, steps=2), tmp_path / "run", quiet=True)
    rows = stretch([tmp_path / "run"], "20,200", 4, chunk=50, device="cpu")
    assert [row["answers"] for row in rows] == [4, 4]
    assert all(row["chance"] < 0.5 and 0 <= row["exact_low"] <= row["exact_match"] for row in rows)
    assert "needle accuracy" in stretch_markdown(rows, "tra stretch", {})
    assert (tmp_path / "run" / "stretch" / "stretch.json").exists()


def test_a_context_that_memory_cannot_hold_is_said_before_it_is_tried(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "measure", lambda *a: pytest.fail("tried"))
    with pytest.raises(
        InputError, match=r"a context of 1,099,511,627,776 tokens \(iid\) .* GiB .* leave that length out"
    ):
        stretch([runs / "tra"], f"32,{2**40}", 2, out=tmp_path, device="cpu")


def test_bad_input(runs, tmp_path):
    with pytest.raises(RunError, match="there is no run folder"):
        stretch([tmp_path / "nowhere"], "32", 1)
    with pytest.raises(InputError, match="lengths has 'x'"):
        stretch([runs / "tra"], "x", 1, out=tmp_path, device="cpu")
    with pytest.raises(InputError, match="named twice"):
        stretch([runs / "tra", runs / "tra"], "32", 1, out=tmp_path, device="cpu")
    with pytest.raises(InputError, match="no split of that name; flip_flop has: iid, sparse, dense"):
        stretch([runs / "tra"], "32", 1, out=tmp_path, splits=["spars"], device="cpu")
    train(tiny_config(task="induction", task_options={"max_length": 6}, steps=1), tmp_path / "other", quiet=True)
    with pytest.raises(InputError, match="flip_flop and induction; stretch compares runs of one task"):
        stretch([runs / "tra", tmp_path / "other"], "32", 1, out=tmp_path, device="cpu")
    (tmp_path / "stretch.json").write_text(json.dumps({"a": 1}))
    with pytest.raises(RunError, match="is not a list of stretch's rows"):
        stretch([runs / "tra"], "32", 1, out=tmp_path, device="cpu")


def test_lengths_are_shown_short():
    assert [short_length(n) for n in (512, 1024, 65536, 1 << 20, 1500)] == ["512", "1k", "64k", "1m", "1500"]


def test_peers_take_smaller_chunks_at_long_lengths(runs):
    tra, rope = opened(runs / "tra"), opened(runs / "rope")
    assert tra.chunk(4096, 1 << 20) == 4096
    assert rope.chunk(4096, 4096) == 4096 and rope.chunk(4096, 1 << 20) == 32
    assert isinstance(rope.model, TraformerForCausalLM)
