from __future__ import annotations

import itertools
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from tests.training.tiny import tiny_config
from traformer.errors import RunError
from traformer.reports.collect import collect, panels
from traformer.reports.plot import _spread, accuracy_plot
from traformer.reports.terminal import comparison_table
from traformer.reports.write import write_report
from traformer.runs.folder import RunFolder


def make_run(path, values, attention="tra", split="iid", **changes):
    """A measured run without a model: `values` are exact match at 12, 24, 48, ... tokens."""
    config = tiny_config(attention=attention, **changes)
    folder = RunFolder(path)
    folder.write_config(config, {"device": "cpu", "threads": 1})
    rows = []
    for place, value in enumerate(values):
        rows.append(
            {"task": config.task, "split": split, "length": 12 * 2**place, "metric": "exact_match", "value": value,
                 "low": max(0.0, value - 0.1), "high": min(1.0, value + 0.1), "examples": 64, "counted": 64,
                 "seed": config.seed,
                 "attention": attention, "step": config.steps, "train_length": 12}
        )  # fmt: skip
    folder.write_results(rows)
    folder.metrics_file.write_text('{"step": 12, "loss": 0.5, "tokens": 1000}\n')
    return folder


@pytest.fixture
def sweep(tmp_path):
    make_run(tmp_path / "rope", [1.0, 0.5, 0.0], "rope")
    make_run(tmp_path / "tra", [1.0, 0.99, 0.97], "tra")
    return tmp_path


class Page(HTMLParser):
    """Every tag and attribute, and that tags close."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.open = [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_page_stands_alone(sweep):
    page = write_report(collect([sweep]), sweep, "A title").read_text()
    parsed = Page(page)
    assert parsed.tags.count("svg") >= 2 and "script" not in parsed.tags and "link" not in parsed.tags
    assert not {"src", "href", "srcset", "onload", "onclick"} & {name for name, _ in parsed.attributes}
    assert "http" not in page and "url(" not in page and "@import" not in page
    assert "prefers-color-scheme:dark" in page


def test_plot_is_well_formed_and_shows_every_point(sweep):
    panel = panels(collect([sweep]))[0]
    svg = ElementTree.fromstring(accuracy_plot(panel, {"TRA": 0, "RoPE": 1}, "tokens"))
    titles = [element.text for element in svg.iter("title")]
    assert len(titles) == 6 and any("RoPE at 48: 0.0 %" in (title or "") for title in titles)
    ticks = [element.text for element in svg.iter("text")]
    assert {"12", "24", "48", "100%", "TRA", "RoPE"} <= set(ticks)
    # A log axis: equal factors, equal distances.
    lines = [e for e in svg.iter("polyline") if e.get("class") == "line"]
    xs = [float(pair.split(",")[0]) for pair in lines[0].get("points", "").split()]
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.2)
    trained = next(e for e in svg.iter("line") if e.get("class") == "trained")
    assert float(trained.get("x1", 0)) == pytest.approx(xs[0], abs=0.2)


def test_text_from_outside_is_escaped(tmp_path):
    make_run(tmp_path / "<b>run", [0.5, 0.5], model_options={"<script>alert(1)</script>": "<i>"})
    make_run(tmp_path / "other", [0.5, 0.5])
    make_run(tmp_path / "odd", [0.5], split="<img src=x onerror=y>")
    page = write_report(collect([tmp_path]), tmp_path, "<script>title</script>").read_text()
    tags = Page(page).tags
    assert "script" not in tags and "i" not in tags and "img" not in tags
    assert "&lt;script&gt;title" in page
    markdown = (tmp_path / "report.md").read_text()
    assert re.search(r"(?<!\\)<script", markdown.split("```")[0]) is None


def test_commands_repeat_the_run(sweep, capsys):
    runs = collect([sweep])
    write_report(runs, sweep)
    markdown = (sweep / "report.md").read_text()
    command = next(line for line in markdown.splitlines() if line.startswith("tra train") and "rope" in line)
    import argparse
    import shlex

    from traformer.commands import train as command_module
    from traformer.runs.config import RunConfig

    parser = argparse.ArgumentParser()
    command_module.add_arguments(parser)
    args = parser.parse_args(shlex.split(command)[2:])
    config = RunConfig.from_dict(command_module._merge({}, command_module.given_settings(args)))
    assert config == runs[0].config
    assert f"tra eval {sweep / 'rope'} --lengths 12,24,48 --examples 64" in markdown


def test_seeds_are_one_series_from_worst_to_best(tmp_path):
    for seed, value in enumerate((0.2, 0.4, 0.9)):
        make_run(tmp_path / f"s{seed}", [1.0, value], seed=seed)
    (panel,) = panels(collect([tmp_path]))
    (series,) = panel.series
    point = series.points[1]
    assert (point.value, point.low, point.high, point.seeds) == (pytest.approx(0.5), 0.2, 0.9, 3)


def test_settings_that_differ_make_two_series(tmp_path):
    make_run(tmp_path / "a", [1.0], lr=0.1)
    make_run(tmp_path / "b", [0.5], lr=0.2)
    labels = {series.label for series in panels(collect([tmp_path]))[0].series}
    assert labels == {"TRA (lr 0.1)", "TRA (lr 0.2)"}


def test_only_the_newest_step_is_shown(tmp_path):
    folder = make_run(tmp_path / "a", [0.25])
    old = [{**row, "step": 1, "value": 0.9} for row in folder.read_results()]
    folder.write_results(old + folder.read_results())
    assert panels(collect([tmp_path]))[0].series[0].points[0].value == 0.25


def test_terminal_table_has_both_methods(sweep):
    (table,) = comparison_table(collect([sweep]))
    assert [column.header for column in table.columns] == ["split", "length", "x trained", "TRA", "RoPE"]
    assert table.row_count == 3


def test_nothing_to_report_is_said(tmp_path):
    with pytest.raises(RunError, match="tra eval RUN"):
        collect([tmp_path])
    with pytest.raises(RunError, match="there is no folder"):
        collect([tmp_path / "absent"])


def test_labels_move_apart_and_stay_inside():
    places = _spread([10.0, 11.0, 200.0, 199.0], 15, 4, 200)
    ordered = sorted(places)
    assert all(b - a >= 15 for a, b in itertools.pairwise(ordered))
    assert min(places) >= 4 and max(places) <= 200


def test_many_methods_are_rows_the_best_first(tmp_path):
    names = ["tra", "rope", "nope", "alibi", "cope", "fot", "stick_breaking", "tra_margin", "tra_plus"]
    for place, name in enumerate(names):
        for seed in (0, 1):
            make_run(tmp_path / f"{name}-{seed}", [1.0, place / 10 + 0.1 * seed, 0.0], name, seed=seed)
    runs = collect([tmp_path])
    page = write_report(runs, tmp_path).read_text()
    assert "caption" in Page(page).tags
    markdown = (tmp_path / "report.md").read_text()
    rows = [line for line in markdown.splitlines() if line.startswith("| ") and " % (" in line]
    assert rows[0].startswith(r"| tra\_plus | 2 | 100.0 % (100.0–100.0) | 85.0 % (80.0–90.0)")
    assert rows[-1].startswith("| TRA |") and len(rows) == len(names)
    assert "mean of up to 2 seeds" in markdown and "64 sequences" in markdown
    assert "(likewise with --seed 1)" in markdown and markdown.count("tra train") == len(names)
    assert "tra_margin" not in next(line for line in markdown.splitlines() if line.startswith("- "))
    (table,) = comparison_table(runs)
    assert next(str(cell) for cell in table.columns[0].cells) == "tra_plus"
    lines = (tmp_path / "report.csv").read_text().splitlines()
    assert lines[0].startswith("run,lr,task,attention,seed") and len(lines) == 1 + 3 * 2 * len(names)
