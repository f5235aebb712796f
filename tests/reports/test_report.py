from __future__ import annotations

import argparse
import csv
import itertools
import json
import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.reports.made import make_run, measurement
from traformer.cli import main
from traformer.commands import train as train_command
from traformer.errors import RunError
from traformer.reports.axes import spread, y_axis
from traformer.reports.collect import collect
from traformer.reports.figures import figures
from traformer.reports.markdown import code_block, quote
from traformer.reports.page import page_styles
from traformer.reports.svg import BOTTOM, HEIGHT, TOP, clipped, figure_svg, line_labels, standalone
from traformer.reports.terminal import comparison_table
from traformer.reports.write import write_report
from traformer.runs import metrics
from traformer.runs.config import RunConfig
from traformer.runs.metrics import Metric


@pytest.fixture
def sweep(tmp_path):
    make_run(tmp_path / "rope", [1.0, 0.5, 0.0], "rope")
    make_run(tmp_path / "tra", [1.0, 0.99, 0.97], "tra")
    return tmp_path


def accuracy(runs):
    """The figures of exact match by length."""
    return [one for one in figures(runs) if (one.metric.name, one.section) == ("exact_match", "accuracy")]


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


def test_page_stands_alone_but_for_downloads_beside_it(sweep):
    page = write_report(collect([sweep]), sweep, "A title").read_text()
    parsed = Page(page)
    assert parsed.tags.count("svg") >= 2 and "script" not in parsed.tags and "link" not in parsed.tags
    assert not {"src", "srcset", "onload", "onclick"} & {name for name, _ in parsed.attributes}
    assert "http" not in page and "url(" not in page and "@import" not in page
    assert "prefers-color-scheme:dark" in page
    links = [value for name, value in parsed.attributes if name == "href" and not value.startswith("#")]
    assert len(links) == 3 * len(figures(collect([sweep])))
    for link in links:
        assert re.fullmatch(r"figures/[a-z0-9-]+\.(png|svg|csv)", link) and (sweep / link).stat().st_size > 0
    png = next(link for link in links if link.endswith("png"))
    assert (sweep / png).read_bytes()[:4] == b"\x89PNG"
    svg = ElementTree.parse(sweep / next(link for link in links if link.endswith("svg")))
    assert svg.getroot().tag == "{http://www.w3.org/2000/svg}svg"
    rows = list(csv.reader((sweep / next(link for link in links if link.endswith("csv"))).open()))
    assert rows[0] == ["method", "length", "exact_match", "low", "high", "seeds", "chance"] and len(rows) == 7


def test_plot_is_well_formed_and_shows_every_point(sweep):
    (figure,) = accuracy(collect([sweep]))
    svg = ElementTree.fromstring(figure_svg(figure, page_styles([figure])))
    titles = [element.text for element in svg.iter("title")]
    assert len(titles) == 6 and any("RoPE at 48: 0.0 %" in (title or "") for title in titles)
    ticks = [element.text for element in svg.iter("text")]
    assert {"12", "24", "48", "100%", "TRA", "RoPE", "chance"} <= set(ticks)
    # A log axis: equal factors, equal distances.
    lines = [e for e in svg.iter("polyline") if e.get("class") == "line"]
    xs = [float(pair.split(",")[0]) for pair in lines[0].get("points", "").split()]
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.2)
    trained = next(e for e in svg.iter("line") if e.get("class") == "trained")
    assert float(trained.get("x1", 0)) == pytest.approx(xs[0], abs=0.2)
    ElementTree.fromstring(standalone(figure_svg(figure, page_styles([figure]))).encode())


# Text from outside ------------------------------------------------------------------------------------------------


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


HOSTILE = (
    "data](javascript:alert(1)) ![x](http://evil.example/x.png) <script> | `code` www.evil.example\n# heading\n---"
)


def test_markdown_shows_hostile_names_as_they_are(tmp_path):
    """A data name, a split, a run's name and a title, none of which may become a link, a heading or a table."""
    protocol = {
        "data": HOSTILE, "split": HOSTILE, "tokenizer": HOSTILE, "vocabulary": 256, "window": 12, "stride": 11,
        "tokens_read_of_text": 10, "tokens_in_text": 10, "words_in_text": 2, "line_ends_in_text": 1,
        "bytes_in_text": 10, "bos": "none", "documents": "1",
    }  # fmt: skip
    folder = make_run(tmp_path / "a`b```c", [1.5], metric="bits_per_byte", task="text", task_options={})
    folder.results.write(
        [one.replace(protocol=protocol, split=HOSTILE.replace("/", ""), task="text") for one in folder.results.read()]
    )
    write_report(collect([tmp_path]), tmp_path, HOSTILE)
    text = (tmp_path / "report.md").read_text()
    outside, inside = "", 0
    fence = None
    for line in text.splitlines():
        if fence is None and line.startswith("```"):
            fence, inside = line.rstrip("sh"), inside + 1
        elif fence is not None:
            fence = None if line == fence else fence
        else:
            outside += line + "\n"
    assert fence is None and inside == 1
    meant = re.sub(r"\\.", "", outside)  # what is left once escaped characters are gone
    for marker in ("](javascript", "](http", "<script", "`code`", "www.evil", "http://evil"):
        assert marker not in meant, marker
    assert [line for line in outside.splitlines() if line.startswith("#")] == [
        f"# {quote(HOSTILE)}", "## Text", "## Text: training", "## How to repeat each number",
    ]  # fmt: skip
    columns = {line.count("|") - line.count("\\|") for line in outside.splitlines() if line.startswith("|")}
    assert len(columns) == 1


@pytest.mark.parametrize("text", ["- item", "1. one", "+ plus", "=== x", "&lt;b&gt;", "~~gone~~", "a_b*c*", "$x$"])
def test_quoted_markdown_has_no_meaning(text):
    quoted = quote(text)
    assert re.sub(r"\\(.)", r"\1", quoted) == text
    assert not re.match(r"[-+=]|\d+[.)]", quoted) and not re.search(r"(?<!\\)[*_~&$<`]", quoted)


def test_a_fence_cannot_be_closed_from_inside():
    lines = code_block(["tra train --out 'a\n````\nb'"])
    assert lines[0] == "`````sh" and lines[2] == "`````"


def test_a_name_that_looks_like_a_formula_stays_text(tmp_path):
    make_run(tmp_path / "=1+1", [0.5])
    write_report(collect([tmp_path]), tmp_path)
    assert "\n'=1+1," in (tmp_path / "report.csv").read_text()


# What a report holds ----------------------------------------------------------------------------------------------


def test_commands_repeat_the_run(sweep):
    runs = collect([sweep])
    write_report(runs, sweep)
    markdown = (sweep / "report.md").read_text()
    assert "tokens. Chance: always the same bit." in markdown
    command = next(line for line in markdown.splitlines() if line.startswith("tra train") and "rope" in line)
    parser = argparse.ArgumentParser()
    train_command.add_arguments(parser)
    args = parser.parse_args(shlex.split(command)[2:])
    config = RunConfig.from_dict(train_command._merge({}, train_command.given_settings(args)))
    assert config == runs[0].config
    assert f"tra eval {sweep / 'rope'} --lengths 12,24,48 --examples 64" in markdown


def test_seeds_are_one_series_with_a_band_from_worst_to_best(tmp_path):
    for seed, value in enumerate((0.2, 0.4, 0.9)):
        make_run(tmp_path / f"s{seed}", [1.0, value], seed=seed)
    (figure,) = accuracy(collect([tmp_path]))
    (series,) = figure.series
    point = series.points[1]
    assert (point.value, point.low, point.high, point.seeds) == (pytest.approx(0.5), 0.2, 0.9, 3)
    svg = ElementTree.fromstring(figure_svg(figure, page_styles([figure])))
    (band,) = [e for e in svg.iter("polygon") if e.get("class") == "band"]
    assert len(band.get("points", "").split()) == 4


def test_a_band_that_ends_at_zero_stays_inside_a_log_plot(tmp_path):
    for seed, value in enumerate((0.0, 0.1)):
        make_run(tmp_path / f"s{seed}", [value, 0.2], metric="error_per_read", seed=seed)
    figure = next(one for one in figures(collect([tmp_path])) if one.metric.name == "error_per_read")
    svg = ElementTree.fromstring(figure_svg(figure, page_styles([figure])))
    (band,) = [e for e in svg.iter("polygon") if e.get("class") == "band"]
    heights = [float(pair.split(",")[1]) for pair in band.get("points", "").split()]
    assert min(heights) >= TOP and max(heights) <= HEIGHT - BOTTOM


def test_no_error_in_any_seed_is_drawn_at_the_bound(tmp_path):
    for seed in (0, 1):
        make_run(tmp_path / f"s{seed}", [0.0], metric="error_per_read", seed=seed)
    figure = next(one for one in figures(collect([tmp_path])) if one.metric.name == "error_per_read")
    (point,) = figure.series[0].points
    assert (point.value, point.high, figure.height(point)) == (0.0, 0.1, 0.1)
    assert "marker bound" in figure_svg(figure, page_styles([figure]))


def test_a_share_of_zero_is_drawn_at_zero(tmp_path):
    make_run(tmp_path / "a", [1.0, 0.0])
    (figure,) = [one for one in figures(collect([tmp_path])) if one.metric.name == "exact_match"]
    point = figure.series[0].points[1]
    assert point.value == 0.0 and point.high == 0.1 and figure.height(point) == 0.0


def test_lines_of_one_method_are_told_apart_by_their_settings(tmp_path):
    for lr in (0.001, 0.002):
        make_run(tmp_path / f"lr{lr}", [1.0, 0.5], lr=lr)
    make_run(tmp_path / "rope", [1.0, 0.5], "rope", lr=0.001)
    figure = figures(collect([tmp_path]))[0]
    assert set(line_labels(figure).values()) == {"TRA (lr 0.001)", "TRA (lr 0.002)", "RoPE"}
    assert len(clipped("x" * 99)) == 26


def test_lengths_are_given_as_multiples_of_the_trained_one(tmp_path):
    make_run(tmp_path / "a", [1.0, 0.5, 0.25])
    figure = figures(collect([tmp_path]))[0]
    svg = figure_svg(figure, page_styles([figure]))
    assert [f">{text}</text>" in svg for text in ("trained", "2×", "4×")] == [True] * 3


def test_numbers_beside_a_log_axis_are_round(tmp_path):
    make_run(tmp_path / "a", [0.173, 0.9], metric="error_per_read")
    figure = next(one for one in figures(collect([tmp_path])) if one.metric.name == "error_per_read")
    ticks = y_axis(figure, 0, 100).ticks
    assert 3 <= len(ticks) <= 6 and all(len(f"{tick:g}".replace("0", "").replace(".", "")) == 1 for tick in ticks)


def test_settings_that_differ_make_two_series(tmp_path):
    make_run(tmp_path / "a", [1.0], lr=0.1)
    make_run(tmp_path / "b", [0.5], lr=0.2)
    labels = {series.label for series in accuracy(collect([tmp_path]))[0].series}
    assert labels == {"TRA (lr 0.1)", "TRA (lr 0.2)"}


def test_only_the_newest_step_is_shown(tmp_path):
    folder = make_run(tmp_path / "a", [0.25])
    old = [one.replace(step=1, value=0.9) for one in folder.results.read()]
    folder.results.write(old + folder.results.read())
    assert accuracy(collect([tmp_path]))[0].series[0].points[0].value == 0.25


def test_terminal_table_has_both_methods(sweep):
    (table,) = comparison_table(collect([sweep]))
    assert [column.header for column in table.columns] == ["split", "length", "x trained", "TRA", "RoPE", "chance"]
    assert table.row_count == 3


def test_chance_is_filled_in_for_runs_that_were_measured_without(tmp_path):
    folder = make_run(tmp_path / "a", [0.5, 0.4, 0.4], split="sparse")
    longer = measurement(folder.read_config(), 256, 0.4, split="sparse")
    folder.results.write([*folder.results.read(), longer])
    (figure,) = accuracy(collect([tmp_path]))
    chance = {point.label: point.chance for point in figure.series[0].points}
    assert chance["256"] == pytest.approx(0.405, abs=0.001)  # always "0" is right that often


def test_every_study_joins_the_page(tmp_path):
    folder = make_run(tmp_path / "a", [1.0, 0.5])
    config = folder.read_config()
    far = {"study": "stretch", "protocol": {"chunk": 64}}
    inside = {"study": "diagnosis", "protocol": {"queries": 4, "train_tokens": 12}}
    more = [
        measurement(config, 24, 0.8, "token_accuracy"),
        measurement(config, 24, 0.0, "error_per_read", low=0.0, high=1e-3),
        measurement(config, 1024, 0.9, **far),
        measurement(config, 4096, None, note="out of time: stopped", **far),
        measurement(config, 1024, 512.0, "keys_read", **far),
        measurement(config, 1024, 20.0, "microseconds_per_token", **far),
        *(measurement(config, 12, 0.01 * h, "residue", at={"layer": 0, "head": h}, **inside) for h in (0, 1)),
        *(measurement(config, 12, 0.5 + h / 4, "source_weight", at={"layer": 0, "head": h}, **inside) for h in (0, 1)),
        *(measurement(config, 12, 0.5, "marks", at={"layer": 0, "head": h}, **inside) for h in (0, 1)),
        measurement(config, 12, 0.125, "lifted_pairs", **inside),
        measurement(config, 12, 0.25, "lifted_by_distance", at={"distance": 4, "to": 7}, **inside),
    ]
    folder.results.write([*folder.results.read(), *more])
    page = write_report(collect([tmp_path]), tmp_path).read_text()
    Page(page)
    for title in (
        "Flip-flop IID: exact match", "Flip-flop IID: token accuracy", "Flip-flop IID: error per read",
        "Flip-flop IID: keys read per query", "Flip-flop IID: time per token (µs)", "Flip-flop IID: residue",
        "Flip-flop IID: weight on the source", "Flip-flop IID: lifted pairs",
        "Flip-flop IID: lifted pairs by distance", "Flip-flop: training loss",
    ):  # fmt: skip
        assert f">{title}<" in page, title
    for heading in ("Flip-flop: far beyond training", "Flip-flop: inside the attention", "Flip-flop: training"):
        assert f"<h2>{heading}</h2>" in page
    assert "out of time: stopped" in page and "always the same bit" in page
    residue = next(one for one in figures(collect([tmp_path])) if one.metric.name == "residue")
    assert residue.series[0].points[0].value == 0.01  # of the head that reads: most weight on the source
    markdown = (tmp_path / "report.md").read_text()
    assert "tra stretch" in markdown and "--chunk 64" in markdown and "tra diagnose" in markdown
    rows = list(csv.DictReader((tmp_path / "report.csv").open()))
    assert {row["study"] for row in rows} == {"eval", "stretch", "diagnosis"}
    assert "layer=0 head=1" in {row["at"] for row in rows}


def test_loss_by_place_is_of_the_longest_window(tmp_path):
    folder = make_run(
        tmp_path / "a", [1.5, 1.4], metric="bits_per_byte", split="validation", task="text", task_options={}
    )
    config = folder.read_config()
    places = [
        measurement(
            config, length, 3.0 - place / 10, "loss_by_place", split="validation", low=None, high=None,
            at={"place": place, "to": 2 * place - 1},
        )
        for length in (12, 24) for place in (1, 2, 4, 8) if place < length
    ]  # fmt: skip
    folder.results.write([*folder.results.read(), *places])
    (figure,) = [one for one in figures(collect([tmp_path])) if one.metric.name == "loss_by_place"]
    assert [point.label for point in figure.series[0].points] == ["1", "2-3", "4-7", "8-15"] and figure.edge == 12


def test_a_new_metric_is_one_entry(tmp_path, monkeypatch):
    """Once it is in the registry, a measurement of it is in every table, plot and file."""
    new = Metric("surprise", "surprise of the reader", "How surprised a reader is.", scale="linear", better="lower")
    monkeypatch.setitem(metrics.METRICS, "surprise", new)
    make_run(tmp_path / "a", [2.5, 3.5], metric="surprise", split="dense")
    runs = collect([tmp_path])
    page = write_report(runs, tmp_path).read_text()
    assert ">Flip-flop dense: surprise of the reader<" in page and "lower is better" in page
    assert "How surprised a reader is." in page and "<b>" not in page  # no bar of a share
    assert "Surprise of the reader, lower is better" in (tmp_path / "report.md").read_text()
    assert "surprise" in (tmp_path / "report.csv").read_text()
    assert any("surprise of the reader" in str(table.title) for table in comparison_table(runs))
    assert list((tmp_path / "figures").glob("*surprise.png"))


def test_many_methods_have_a_panel_each_and_are_rows_the_best_first(tmp_path):
    names = ["tra", "rope", "nope", "alibi", "cope", "fot", "stick_breaking", "tra_margin", "tra_plus"]
    for place, name in enumerate(names):
        for seed in (0, 1):
            make_run(tmp_path / f"{name}-{seed}", [1.0, place / 10 + 0.1 * seed, 0.0], name, seed=seed)
    runs = collect([tmp_path])
    page = write_report(runs, tmp_path).read_text()
    assert "caption" in Page(page).tags
    figure = accuracy(runs)[0]
    svg = ElementTree.fromstring(figure_svg(figure, page_styles([figure])))
    assert len([e for e in svg.iter("polyline") if e.get("class") == "line"]) == len(names)
    assert len([e for e in svg.iter("polyline") if e.get("class") == "others"]) == len(names)
    assert len(list(svg.iter("use"))) == len(names)  # the grey lines are written once and shown behind every method
    markdown = (tmp_path / "report.md").read_text()
    rows = [line for line in markdown.splitlines() if line.startswith("| ") and " % (" in line]
    plus = quote(figure.ranked()[0].label)
    assert rows[0].startswith(f"| {plus} | 2 | 100.0 % (100.0–100.0) | 85.0 % (80.0–90.0)")
    assert rows[-1].startswith("| TRA |") and len(rows) == len(names)
    assert "mean of up to 2 seeds" in markdown and "64 sequences" in markdown
    assert "(likewise with --seed 1)" in markdown and markdown.count("tra train") == len(names)
    finding = next(line for line in markdown.splitlines() if line.startswith("- "))
    assert finding.endswith("4 more below.") and plus in finding
    table = comparison_table(runs)[0]
    assert quote(next(str(cell) for cell in table.columns[0].cells)) == plus
    lines = (tmp_path / "report.csv").read_text().splitlines()
    assert lines[0].startswith("run,lr,task,attention,seed") and len(lines) == 1 + 3 * 2 * len(names)


EXPERIMENT = """
from traformer.experiments.protocol import Verdict
def cells():
    return []
def verdicts(out):
    assert (out / "a").is_dir()
    return [
        Verdict("H1", "It is <good>", "holds", "97 %"),
        Verdict("H2", "It | is better", "does not hold", ""),
        Verdict("H3", "It is best", "not decided", "1 of 5 seeds"),
    ]
"""


def test_verdicts_of_an_experiment_are_printed(tmp_path, capsys):
    make_run(tmp_path / "runs" / "a", [1.0])
    (tmp_path / "trial.py").write_text(EXPERIMENT)
    assert main(["report", str(tmp_path / "runs"), "--experiment", str(tmp_path / "trial.py")]) == 0
    out = capsys.readouterr().out
    assert "does not hold" in out and "not decided" in out and "It is <good>" in out
    page = (tmp_path / "runs" / "report.html").read_text()
    assert '<td class="outcome does-not-hold">does not hold</td>' in page and "It is &lt;good&gt;" in page
    assert r"| H2 | It \| is better | does not hold |  |" in (tmp_path / "runs" / "report.md").read_text()
    (tmp_path / "trial.py").write_text("def cells():\n    return []\n")
    assert main(["report", str(tmp_path / "runs"), "--experiment", str(tmp_path / "trial.py")]) == 2
    assert "states no hypotheses" in capsys.readouterr().err
    (tmp_path / "trial.py").write_text("def cells():\n    return []\ndef verdicts(out):\n    return ['yes']\n")
    assert main(["report", str(tmp_path / "runs"), "--experiment", str(tmp_path / "trial.py")]) == 2
    assert "must give Verdicts, not str" in capsys.readouterr().err


# What is damaged or missing ---------------------------------------------------------------------------------------


def test_nothing_to_report_is_said(tmp_path):
    with pytest.raises(RunError, match="tra eval RUN"):
        collect([tmp_path])
    with pytest.raises(RunError, match="there is no folder"):
        collect([tmp_path / "absent"])


@pytest.mark.parametrize("text", ["garbage", "5", '{"step": "x", "loss": 1}', '{"loss": NaN, "step": 4}', "\x00"])
def test_a_damaged_log_never_blocks_a_report(tmp_path, text):
    folder = make_run(tmp_path / "a", [1.0])
    folder.metrics_file.write_text(f"{text}\n")
    assert "exact match" in write_report(collect([tmp_path]), tmp_path).read_text()


def test_damaged_results_are_one_sentence(tmp_path, capsys):
    folder = make_run(tmp_path / "a", [1.0])
    folder.results.file.write_text('[{"split": 1}]')
    assert main(["report", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "results.json: row 1 has" in error and "evaluate again" in error


def test_old_files_of_several_runs_reach_their_runs(tmp_path):
    make_run(tmp_path / "a", [1.0])
    make_run(tmp_path / "b", [0.5], "rope")
    old = {
        "task": "flip_flop", "split": "iid", "length": 4096, "size": 4096, "train_length": 12, "step": 12,
        "examples": 10, "seed": 0, "chunk": 64, "threads": 1, "time_limit": 40, "seconds": 4.0, "status": "measured",
        "microseconds_per_token": 9.0, "cpu_microseconds_per_token": 6.0, "answers": 90, "errors": 9,
        "error_per_answer": 0.1, "error_upper_bound": 0.2, "exact_match": 0.5, "exact_low": 0.0, "exact_high": 0.9,
        "keys_read_mean": 99.0, "keys_read_most": 100, "keys_kept_mean": None,
    }  # fmt: skip
    (tmp_path / "a" / "stretch").mkdir()
    rows = [{**old, "run": "runs/a", "attention": "tra"}, {**old, "run": "runs/b", "attention": "rope"}]
    (tmp_path / "a" / "stretch" / "stretch.json").write_text(json.dumps(rows))
    (keys,) = [one for one in figures(collect([tmp_path])) if one.metric.name == "keys_read"]
    assert {series.label for series in keys.series} == {"TRA", "RoPE"}


def test_labels_move_apart_and_stay_inside():
    places = spread([10.0, 11.0, 200.0, 199.0], 15, 4, 200)
    ordered = sorted(places)
    assert all(b - a >= 15 for a, b in itertools.pairwise(ordered))
    assert min(places) >= 4 and max(places) <= 200
    assert spread([0.0, 0.0], 15, 4, 200) == [4.0, 19.0]  # beyond the top, too


def test_a_report_needs_no_torch(sweep):
    code = (
        "import sys; from traformer.cli import main; assert main(sys.argv[1:]) == 0; assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code, "report", str(sweep)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert Path(sweep / "report.html").exists()
