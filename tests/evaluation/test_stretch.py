from __future__ import annotations

import shutil

import pytest
import torch

from tests.training.tiny import tiny_config
from traformer.cli import main
from traformer.errors import InputError, RunError
from traformer.evaluation import stretch as module
from traformer.evaluation.by_length import measure as measure_whole
from traformer.evaluation.opened import OpenedRun
from traformer.evaluation.stretch import StretchRun, stretch
from traformer.layers import ThresholdRelativeAttention
from traformer.models import TraformerForCausalLM
from traformer.reports.stretch import stretch_markdown
from traformer.reports.svg import length_text
from traformer.runs.folder import RunFolder
from traformer.tasks.base import Task
from traformer.training.loop import train


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A TRA and a RoPE run, hardly trained: what they get wrong is all the more to compare."""
    folder = tmp_path_factory.mktemp("runs")
    for attention in ("tra", "rope"):
        train(tiny_config(attention=attention, steps=4), folder / attention, quiet=True)
    return folder


@pytest.fixture
def runs(trained, tmp_path):
    """A copy of them, nothing measured yet."""
    return shutil.copytree(trained, tmp_path / "runs")


def opened(path, time_limit=None) -> StretchRun:
    run = OpenedRun.open(path, device="cpu")
    return StretchRun(run.folder, run.model, run.task, run.config, run.step, str(path), time_limit)


def stored(path):
    return [one for one in RunFolder(path).results.read() if one.study == "stretch"]


def cells(measured):
    """{(length, split): {metric: measurement}} of one run."""
    found = {}
    for one in measured:
        found.setdefault((one.length, one.split), {})[one.metric] = one
    return found


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


def test_measurements(runs):
    both = [str(runs / "tra"), str(runs / "rope")]
    found = stretch(both, "32,1k", 3, chunk=256, time_limit=60, device="cpu")
    assert list(found) == both
    for run, measured in found.items():
        by_cell = cells(measured)
        assert list(by_cell) == [(length, split) for length in (32, 1024) for split in ("iid", "sparse", "dense")]
        for (length, _), one in by_cell.items():
            assert one["exact_match"].examples == 3 and one["exact_match"].train_length == 12
            error = one["error_per_read"]
            assert error.value == pytest.approx(1 - one["token_accuracy"].value)
            assert error.value <= error.high <= 1 and one["exact_match"].chance is not None
            assert one["microseconds_per_token"].value > 0 and one["cpu_microseconds_per_token"].value > 0
            assert one["keys_read"].value <= one["keys_read_most"].value <= length
        assert stored(run) == measured


def test_what_is_measured_is_not_measured_again(runs, monkeypatch):
    settings = {"chunk": 64, "time_limit": 60, "device": "cpu", "splits": ["iid"]}
    both = [runs / "tra", runs / "rope"]
    first = stretch(both, "32", 2, **settings)
    calls = []
    original = module.measure
    monkeypatch.setattr(module, "measure", lambda run, *rest: calls.append(run.name) or original(run, *rest))
    assert stretch(both, "32", 2, **settings) == first and calls == []
    stretch(both, "32,64", 2, **settings)
    assert len(calls) == 2
    stretch(both, "32", 3, **settings)  # other examples: they take the place of the old ones
    assert len(calls) == 4 and set(cells(stored(runs / "tra"))) == {(32, "iid"), (64, "iid")}
    stretch(both, "32", 3, again=True, **settings)
    assert len(calls) == 6


def test_a_peer_out_of_time_stops_and_says_so(runs, monkeypatch):
    settings = {"chunk": 64, "device": "cpu", "splits": ["iid"]}
    tra, rope = str(runs / "tra"), str(runs / "rope")
    found = stretch([tra, rope], "64,256,1k", 2, time_limit=1e-9, **settings)
    assert all(one.value is not None for one in found[tra]) and len(cells(found[tra])) == 3
    peers = cells(found[rope])
    notes = [one["exact_match"].note for one in peers.values()]
    assert notes == [
        "out of time: stopped after 1e-09 s at 64 of 128 tokens",
        "not tried: out of time at 64 already",
        "not tried: out of time at 64 already",
    ]
    assert "error_per_read" not in peers[64, "iid"] and peers[64, "iid"]["microseconds_per_token"].value > 0
    # With no more time there is nothing to try; with more there is.
    monkeypatch.setattr(module, "measure", lambda *rest: pytest.fail("tried"))
    assert stretch([tra, rope], "64,256,1k", 2, time_limit=1e-9, **settings) == found
    monkeypatch.undo()
    found = stretch([tra, rope], "64,256,1k", 2, time_limit=60, **settings)
    assert all(one.value is not None for one in found[rope])


def test_interrupting_keeps_what_was_measured(runs, tmp_path, monkeypatch, capsys):
    original = module.measure

    def interrupted(run, split, *rest):
        if split.name == "dense":
            raise KeyboardInterrupt
        return original(run, split, *rest)

    monkeypatch.setattr(module, "measure", interrupted)
    out = str(tmp_path / "out")
    assert main(["stretch", str(runs / "tra"), "--lengths", "32", "--examples", "2", "--out", out]) == 130
    captured = capsys.readouterr()
    assert "this was measured before" in captured.err and "sparse" in captured.out
    assert {one.split for one in stored(runs / "tra")} == {"iid", "sparse"}


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


@pytest.mark.parametrize("attention", ["tra_plus", "tra_distance_only", "fot", "lstm"])
def test_every_kind_of_name(attention, tmp_path):
    train(tiny_config(attention=attention, steps=1), tmp_path / "run", quiet=True)
    (measured,) = stretch([tmp_path / "run"], "64", 1, chunk=32, device="cpu", splits=["iid"]).values()
    by_metric = cells(measured)[64, "iid"]
    assert ("keys_read" in by_metric) == (attention in ("tra_plus", "tra_distance_only"))
    assert ("keys_kept" in by_metric) == (attention == "tra_plus")


def test_needles_have_an_accuracy_and_a_chance(tmp_path):
    train(tiny_config(task="induction", task_options={"max_length": 6}, steps=2), tmp_path / "run", quiet=True)
    found = stretch([tmp_path / "run"], "20,200", 4, chunk=50, device="cpu")
    (measured,) = found.values()
    exact = [one for one in measured if one.metric == "exact_match"]
    assert [one.counted for one in exact] == [4, 4]
    assert all(one.chance < 0.5 and 0 <= one.low <= one.value for one in exact)
    assert "exact match" in stretch_markdown(found, "tra stretch", {})


def test_a_context_that_memory_cannot_hold_is_said_before_it_is_tried(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "measure", lambda *a: pytest.fail("tried"))
    with pytest.raises(
        InputError, match=r"a context of 1,099,511,627,776 tokens \(iid\) .* GiB .* leave that length out"
    ):
        stretch([runs / "tra"], f"32,{2**40}", 2, device="cpu")


def test_bad_input(runs, tmp_path):
    with pytest.raises(RunError, match="there is no run folder"):
        stretch([tmp_path / "nowhere"], "32", 1)
    with pytest.raises(InputError, match="lengths has 'x'"):
        stretch([runs / "tra"], "x", 1, device="cpu")
    with pytest.raises(InputError, match="named twice"):
        stretch([runs / "tra", runs / "tra"], "32", 1, device="cpu")
    with pytest.raises(InputError, match="no split of that name; flip_flop has: iid, sparse, dense"):
        stretch([runs / "tra"], "32", 1, splits=["spars"], device="cpu")
    train(tiny_config(task="induction", task_options={"max_length": 6}, steps=1), tmp_path / "other", quiet=True)
    with pytest.raises(InputError, match="flip_flop and induction; stretch compares runs of one task"):
        stretch([runs / "tra", tmp_path / "other"], "32", 1, device="cpu")
    (runs / "tra" / "results.json").write_text('{"a": 1}')
    with pytest.raises(RunError, match="is not a list of rows"):
        stretch([runs / "tra"], "32", 1, device="cpu")


def test_lengths_are_shown_short():
    assert [length_text(n) for n in (512, 1024, 65536, 1 << 20, 1500)] == ["512", "1,024", "64k", "1M", "1,500"]


def test_peers_take_smaller_chunks_at_long_lengths(runs):
    tra, rope = opened(runs / "tra"), opened(runs / "rope")
    assert tra.chunk(4096, 1 << 20) == 4096
    assert rope.chunk(4096, 4096) == 4096 and rope.chunk(4096, 1 << 20) == 32
    assert isinstance(rope.model, TraformerForCausalLM)
