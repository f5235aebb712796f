"""The store of measurements: rows, what is missing, what earlier versions left, and damaged files."""

from __future__ import annotations

import json
import multiprocessing

import pytest

from traformer.errors import RunError
from traformer.runs.legacy import legacy_measurements
from traformer.runs.measurements import Job, Measurement, Request, ResultStore, measure_missing, write_rows
from traformer.runs.metrics import METRICS, SECTIONS, metric_named


def measured(metric="exact_match", value=0.5, length=8, split="iid", **changes) -> Measurement:
    settings = {
        "task": "flip_flop", "split": split, "length": length, "metric": metric, "value": value, "low": 0.4,
        "high": 0.6, "examples": 16, "seed": 0, "attention": "tra", "step": 10, "train_length": 8,
    }  # fmt: skip
    return Measurement(**{**settings, **changes})


def test_rows_come_back_as_they_were(tmp_path):
    store = ResultStore(tmp_path)
    assert store.read() == []
    store.write([])
    assert store.read() == []
    all_kinds = [
        measured(),
        measured(value=1e-300, low=None, high=None, note="why"),
        measured(value=None, low=None, high=None, chance=0.25, seen_in_training=0.5, counted=3),
        measured("residue", at={"layer": 1, "head": 0}, study="diagnosis", protocol={"queries": 4}, length="5-8"),
    ]
    store.write(all_kinds)
    assert store.read() == all_kinds
    assert "at" not in all_kinds[0].to_row() and all_kinds[3].size == 8


def test_rows_of_another_version_keep_what_is_known(tmp_path):
    row = {**measured().to_row(), "of tomorrow": 1}
    write_rows(tmp_path / "results.json", [row])
    assert ResultStore(tmp_path).read() == [measured()]


@pytest.mark.parametrize("text", ["{}", "[1", "", "[1, 2]", '[{"split": "iid"}]', "[[]]", "[" * 100_000, '{"a": ['])
def test_a_damaged_file_is_a_sentence(tmp_path, text):
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(RunError, match=r"results\.json.* delete"):
        ResultStore(tmp_path).read()


@pytest.mark.parametrize(
    "change", [{"value": "high"}, {"length": "long"}, {"step": None}, {"step": True}, {"at": [1]}, {"examples": 1.5}]
)
def test_a_damaged_row_is_named(tmp_path, change):
    write_rows(tmp_path / "results.json", [measured().to_row(), {**measured().to_row(), **change}])
    with pytest.raises(RunError, match=rf"row 2 has {next(iter(change))} = "):
        ResultStore(tmp_path).read()


@pytest.mark.parametrize("places", [1, [None], [[1, 2]], [[1, 2, "low"]]])
def test_a_damaged_loss_by_place_of_an_older_row_is_named(tmp_path, places):
    write_rows(tmp_path / "results.json", [{**measured().to_row(), "loss_by_position": places}])
    with pytest.raises(RunError, match="row 1 has a loss_by_position that is no list"):
        ResultStore(tmp_path).read()


def test_only_what_is_missing_is_measured_and_each_part_is_stored_at_once(tmp_path):
    store, calls, told = ResultStore(tmp_path), [], []

    def jobs(*lengths, **changes):
        return [
            Job(Request("iid", length, 10, **{"examples": 16, "seed": 0, **changes}), store, length)
            for length in lengths
        ]

    def measure(job):
        calls.append(job.subject)
        if job.subject == 99:
            raise KeyboardInterrupt
        return [
            measured(length=job.subject, examples=job.request.examples, protocol=job.request.protocol),
            measured(
                "token_accuracy", length=job.subject, examples=job.request.examples, protocol=job.request.protocol
            ),
        ]

    def run(wanted, **options):
        return list(measure_missing(wanted, measure, on_missing=told.append, **options))

    first = run(jobs(8, 16))
    assert calls == [8, 16] and told == [[8, 16]] and [length for length, _ in first] == [8, 16]
    assert run(jobs(16, 8)) == first[::-1] and calls == [8, 16]
    with pytest.raises(KeyboardInterrupt):
        run(jobs(8, 32, 99))
    assert calls == [8, 16, 32, 99] and store.missing([job.request for job in jobs(8, 32, 99)]) == [jobs(99)[0].request]
    # Other settings replace what is there, so that a length never appears twice; records do not count as settings.
    run(jobs(8, examples=64))
    assert {one.examples for one in store.read() if one.length == 8} == {64}
    run(jobs(16, protocol={"threads": 7}))
    assert calls == [8, 16, 32, 99, 8]
    run(jobs(16), again=True)
    assert calls[-1] == 16 and len(calls) == 6
    run(jobs(16), usable=lambda subject, found: False)
    assert len(calls) == 7


def test_studies_stand_side_by_side(tmp_path):
    store = ResultStore(tmp_path)
    store.put([measured()])
    store.put([measured(study="stretch", value=0.1)])
    store.put([measured(step=20, value=0.2)])
    store.put([measured(value=0.7)])
    assert [(one.study, one.step, one.value) for one in store.read()] == [
        ("stretch", 10, 0.1), ("eval", 20, 0.2), ("eval", 10, 0.7),
    ]  # fmt: skip


# What earlier versions left ---------------------------------------------------------------------------------------


def test_loss_by_position_of_an_old_text_row_becomes_measurements(tmp_path):
    row = {**measured("perplexity", task="text").to_row(), "loss_by_position": [[1, 1, 3.5], [2, 3, 2.5]]}
    write_rows(tmp_path / "results.json", [row])
    perplexity, first, second = ResultStore(tmp_path).read()
    assert perplexity.metric == "perplexity" and first.metric == second.metric == "loss_by_place"
    assert (second.value, dict(second.at), second.low) == (2.5, {"place": 2, "to": 3}, None)


OLD_STRETCH = {
    "run": "runs/demo/a", "task": "flip_flop", "attention": "rope", "split": "dense", "length": 4096, "size": 4096,
    "train_length": 64, "step": 1200, "examples": 10, "seed": 0, "chunk": 4096, "threads": 1, "time_limit": 40,
    "seconds": 4.005, "microseconds_per_token": 97.7, "cpu_microseconds_per_token": 60.7, "status": "measured",
    "answers": 9147, "errors": 3840, "error_per_answer": 0.42, "error_upper_bound": 0.43, "exact_match": 0.0,
    "exact_low": 0.0, "exact_high": 0.28, "keys_read_mean": 2048.5, "keys_read_most": 4096, "keys_kept_mean": None,
}  # fmt: skip
OLD_HEAD = {
    "run": "runs/demo/a", "task": "copy", "attention": "tra", "seed": 0, "step": 500, "train_length": 6,
    "train_tokens": 15, "length": 6, "queries": 192, "kind": "head", "layer": 0, "head": 1, "residue": 0.9,
    "source": 0.1, "marks": 0.2, "positive": 0.5, "decay": None, "lifted": 0.25, "log_ratio": 2.0, "pairs": 100,
    "reads": False, "marks_most": True,
}  # fmt: skip
OLD_DISTANCE = {**OLD_HEAD, "kind": "distance", "from": 4, "to": 7, "in_trained_range": True}


def test_old_stretch_and_diagnosis_files_are_part_of_the_store(tmp_path):
    run = tmp_path / "a"
    (run / "stretch").mkdir(parents=True)
    late = {**OLD_STRETCH, "length": 8192, "status": "out of time", "reason": "stopped after 40 s"}
    write_rows(run / "stretch" / "stretch.json", [OLD_STRETCH, late, {**OLD_STRETCH, "run": "runs/demo/b"}])
    two = [OLD_HEAD, {**OLD_HEAD, "head": 0, "lifted": 0.75, "pairs": 300}, OLD_DISTANCE]
    (run / "diagnosis.json").write_text(json.dumps({"summary": [], "rows": two}))
    store = ResultStore(run)
    found = store.read()
    by_metric = {(one.metric, one.length): one for one in found if one.study == "stretch"}
    assert by_metric["exact_match", 4096].high == 0.28 and by_metric["error_per_read", 4096].counted == 9147
    assert by_metric["keys_read", 4096].value == 2048.5 and ("keys_kept", 4096) not in by_metric
    assert (
        by_metric["exact_match", 8192].value is None and "out of time: stopped" in by_metric["exact_match", 8192].note
    )
    (whole,) = [one for one in found if one.metric == "lifted_pairs" and not one.at]
    assert whole.value == pytest.approx((0.25 * 100 + 0.75 * 300) / 400) and whole.counted == 400
    (distance,) = [one for one in found if one.metric == "lifted_by_distance"]
    assert dict(distance.at) == {"distance": 4, "to": 7}
    # They move into results.json with the next measurement, and are then read from there alone.
    store.put([measured()])
    assert store.read() == [*found, measured()]
    assert set(legacy_measurements(run / "stretch" / "stretch.json")) == {"a", "b"}
    (run / "diagnosis.json").write_text("{}")
    with pytest.raises(RunError, match=r"diagnosis\.json cannot be read"):
        store.read()


def test_the_registry_is_whole():
    for name, metric in METRICS.items():
        assert metric.name == name and metric.label and metric.summary.endswith(".") and metric.section in SECTIONS
        assert metric.better in ("higher", "lower", "neither")
    assert metric_named("of_tomorrow").label == "of tomorrow"
    exact, error = METRICS["exact_match"], METRICS["error_per_read"]
    assert exact.value_and_interval(0.984, 0.945, 0.996) == "98.4 % (94.5–99.6)"
    assert error.value_and_interval(0.0, 0.0, 3e-5) == "0.00e+00 (< 3.0e-05)"
    assert exact.value_and_interval(None) == "" and exact.direction == "higher is better"


def _put_many(folder, split):
    for length in range(1, 41):
        ResultStore(folder).put([measured(split=split, length=length)])


def test_two_processes_put_at_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_put_many, args=(tmp_path, split)) for split in ("a", "b")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert len(ResultStore(tmp_path).read()) == 80 and not list(tmp_path.glob("*.writing"))
