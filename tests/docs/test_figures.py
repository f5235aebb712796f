"""The figures in README and the docs are those of the committed artefacts in results/."""

from __future__ import annotations

import csv
import json
import math
from collections import defaultdict
from pathlib import Path

import pytest

from traformer.reports.overview import pictures
from traformer.reports.paper_pages import filled
from traformer.reports.svg import standalone

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
METHODS = {
    "TRA": "tra", "`tra_plus`": "tra_plus", "tra_plus": "tra_plus", "RoPE": "rope", "FoT": "fot", "ALiBi": "alibi",
    "NoPE": "nope", "CoPE": "cope", "stick-breaking": "stick_breaking",
    "`tra_straight_through`": "tra_straight_through",
}  # fmt: skip


def tables(page: str, first: str) -> list[list[list[str]]]:
    """The cells of every table of a page whose head starts with `first`, bold marks removed; heads left out."""
    found, rows = [], []
    for line in [*(ROOT / page).read_text(encoding="utf-8").splitlines(), ""]:
        if line.startswith("|"):
            rows.append([cell.strip().replace("**", "") for cell in line.strip().strip("|").split("|")])
        elif rows:
            if rows[0][0] == first or "|".join(rows[0]).startswith(first):
                found.append(rows[2:])
            rows = []
    return found


def page_with(mark: str) -> str:
    """The text of the one page of docs/ that has a line `mark`."""
    (page,) = (
        text for text in (path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")) if mark in text
    )
    return page


def measured(folder: str, metric: str) -> dict[tuple[str, str, str, int], list[float]]:
    """(task, attention, split, length) -> a value for each seed."""
    values = defaultdict(list)
    with open(RESULTS / folder / "report.csv", encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            if row["metric"] == metric:
                key = (row["task"], row["attention"], row["split"], int(row["length"]))
                values[key].append(float(row["value"]))
    return values


def share(values: list[float]) -> str:
    """As the tables write a mean over seeds: with the worst and the best where they differ."""
    mean, worst, best = (100 * value for value in (sum(values) / len(values), min(values), max(values)))
    return f"{mean:.0f} %" if f"{worst:.0f}" == f"{best:.0f}" else f"{mean:.0f} % ({worst:.0f}–{best:.0f})"


@pytest.mark.parametrize(
    ("page", "first", "windows"),
    [
        ("docs/results.md", "window", (128, 512, 4096)),
        ("docs/text.md", "bits per byte at window", (128, 256, 512, 1024, 2048, 4096)),
    ],
)
def test_text(page, first, windows):
    bits = measured("text", "bits_per_byte")
    (rows,) = tables(page, first)
    for name, *cells in rows:
        values = [bits["text", METHODS[name], "validation", window] for window in windows]
        assert cells == [f"{sum(each) / len(each):.3f}" for each in values], name


def test_copy_of_500_steps():
    exact = measured("peers", "exact_match")
    rows = [row for table in tables("docs/results.md", "exact match") for row in table if row[0].endswith("500 steps")]
    short = [row for row in rows if not row[0].endswith("1,500 steps")]
    assert len(short) == 3
    for name, *cells in short:
        method = METHODS[name.partition(",")[0]]
        assert cells == [share(exact["copy", method, "test", length]) for length in (6, 12, 24, 48)], name


def test_copy_of_1500_steps():
    """Exact match in results.md and, seed by seed, in peers.md, whose weights of heads are those of heads.csv."""
    exact = {}
    for record in map(json.loads, (RESULTS / "copy_seeds" / "records.jsonl").read_text().splitlines()):
        rows = [{**record["shared"], **row} for row in record["results"]]
        exact[record["name"]] = {row["length"]: row["value"] for row in rows if row["metric"] == "exact_match"}
    rows = [row for table in tables("docs/results.md", "exact match") for row in table if "1,500" in row[0]]
    assert len(rows) == 3
    for name, *cells in rows:
        runs = [exact[f"copy-{METHODS[name.partition(',')[0]]}-seed{seed}"] for seed in range(4)]
        assert cells == [share([run[length] for run in runs]) for length in (6, 12, 24, 48)], name
    with open(RESULTS / "copy_seeds" / "heads.csv", encoding="utf-8") as lines:
        heads = {tuple(row[k] for k in ("attention", "seed", "head", "step")): row for row in csv.DictReader(lines)}
    (rows,) = tables("docs/peers.md", "run|exact match at 1x, 2x, 4x, 8x")
    assert len(rows) == 9
    for name, accuracy, *cells in rows[:8]:
        method, seed = METHODS[name.partition(",")[0]], name[-1]
        run = exact[f"copy-{method}-seed{seed}"]
        assert accuracy == ", ".join(f"{100 * run[length]:.0f}" for length in (6, 12, 24, 48)), name
        for cell, (head, what) in zip(
            cells, [(head, what) for head in ("marking", "reading") for what in ("weight", "gate")], strict=True
        ):
            at = [float(heads[method, seed, head, step][what]) for step in ("100", "500", "1500")]
            assert cell == ", ".join(f"{value:.2f}" for value in at), name


def test_the_table_of_peers():
    exact = measured("peers", "exact_match")
    (rows,) = tables("docs/peers.md", "|flip-flop IID")
    assert len(rows) == 9 and rows[-1][0] == "chance"
    for name, *cells in rows[:-1]:
        flip_flop = [share(exact["flip_flop", METHODS[name], split, 256]) for split in ("iid", "sparse", "dense")]
        copy = [share(exact["copy", METHODS[name], "test", length]) for length in (12, 24, 48)]
        assert cells == flip_flop + copy, name


def test_the_reading_heads_of_copy():
    summary = json.loads((RESULTS / "diagnosis_copy" / "diagnosis.json").read_text(encoding="utf-8"))["summary"]
    weight = {(row["attention"], row["seed"], row["length"]): row["source"] for row in summary}
    (rows,) = tables("docs/diagnosis.md", "run|on the source|exact match")
    assert len(rows) >= 10  # every seed of TRA and tra_plus
    for name, written, _ in rows:
        method, seed = name.split(" (")[0].split(", seed ")
        for length, value in zip((6, 12, 24, 48), written.split(", "), strict=True):
            rounding = 0.51 * 10 ** -len(value.partition(".")[2])
            assert float(value) == pytest.approx(weight[method, int(seed), length], abs=rounding), name


@pytest.mark.parametrize("experiment", sorted(path.parent.name for path in RESULTS.glob("*/verdicts.json")))
def test_experiments_under_the_protocol(experiment):
    page = page_with(f"<!-- {experiment} -->")
    for name in ("table.md", "verdicts.md"):
        text = (RESULTS / experiment / name).read_text(encoding="utf-8")
        for part in text.strip().split("\n\n"):
            assert part in page, f"the docs do not have results/{experiment}/{name} as it is now"
    verdicts = json.loads((RESULTS / experiment / "verdicts.json").read_text(encoding="utf-8"))
    assert all(f"| {v['name']} | {v['claim']} | **{v['outcome']}** |" in page for v in verdicts)


def test_fresh_seeds_of_copy():
    page = " ".join((ROOT / "docs" / "results.md").read_text(encoding="utf-8").split())
    right = defaultdict(list)
    with open(RESULTS / "what_works" / "cells.csv", encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            right[row["setting"], row["arm"], int(row["length"])].append(int(row["right"]) / int(row["examples"]))
    for arm, sentence in (("tra_plus", "reaches {} %"), ("no_removal", "all keys in the softmax {} %")):
        means = [100 * sum(values) / len(values) for values in (right["copy", arm, n] for n in (6, 12, 24, 48))]
        assert sentence.format(", ".join(f"{mean:.0f}" for mean in means)) in page
    worst = 100 * min(right["copy", "tra_plus", 24])
    assert f"({worst:.0f} % at 4x)" in page


def test_recall_after_1000_steps():
    right = {}
    records = RESULTS / "recall_in_text/64_tokens/records_1000_steps.jsonl"
    for record in map(json.loads, records.read_text().splitlines()):
        for row in ({**record["shared"], **row} for row in record["results"]):
            if (row["metric"], row["split"]) == ("token_accuracy", "fixed"):
                right[record["name"], row["length"]] = row
    (rows,) = tables("docs/evidence_recall.md", "near_far, 1,000 steps")
    lengths = (64, 256, 1024, 4096)
    for name, *cells in rows[:-1]:
        run = f"recall-near_far-{name.replace(' ', '')}"
        assert cells == [f"{100 * right[run, length]['value']:.0f} %" for length in lengths], name
    assert rows[-1][1:] == [f"{100 * right['recall-near_far-seed10', length]['chance']:.0f} %" for length in lengths]
    plateau = [100 * row["value"] for (run, _), row in right.items() if "local_nope" in run]
    assert f"({min(plateau):.0f} to {max(plateau):.0f} % at" in (ROOT / "docs" / "evidence_recall.md").read_text(
        encoding="utf-8"
    )


def test_recall_far_beyond_the_table():
    with open(RESULTS / "recall_in_text" / "far.csv", encoding="utf-8") as lines:
        read = [row for row in csv.DictReader(lines) if row["arm"] == "near_far"]
    (rows,) = tables("docs/evidence_recall.md", "`near_far`|16,384")
    right, worst, kept = [], [], []
    for length in ("16384", "32768", "65536"):
        seeds = [row for row in read if row["length"] == length]
        assert len(seeds) == 5
        right.append(f"{sum(int(r['right']) for r in seeds)} of {sum(int(r['answers']) for r in seeds)}")
        worst.append(min(f"{r['right']} of {r['answers']}" for r in seeds))
        kept.append(f"{sum(int(r['keys_kept']) for r in seeds) / 5:,.0f}")
    assert [row[1:] for row in rows[1:]] == [right, worst, kept]


def test_the_readme_on_recall_and_text():
    """The figures in its sentences: recall at 8,192 and 65,536 tokens, perplexity in long and in sliding windows."""
    page = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    with open(RESULTS / "recall_in_text" / "cells.csv", encoding="utf-8") as lines:
        cells = [row for row in csv.DictReader(lines) if (row["arm"], row["length"]) == ("near_far", "8192")]
    assert len(cells) == 5
    share_of = 100 * sum(float(row["right"]) / int(row["examples"]) for row in cells) / 5
    assert f"{share_of:.1f} % in 8,192 tokens, 76 of 80 answers in 65,536" in page
    right = defaultdict(list)
    with open(RESULTS / "copy_recipe" / "cells.csv", encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            right[row["arm"], row["length"]].append(100 * float(row["right"]) / int(row["examples"]))
    far = {arm: sum(right[arm, "96"]) / 5 for arm in ("local_far", "local_fot", "tra_plus")}
    assert "copies {local_far:.0f} % at 16 times, the forgetting transformer {local_fot:.0f} %".format(**far) in page
    assert f"`tra_plus` in both layers {far['tra_plus']:.0f} %" in page
    for experiment, lengths in (("copy_longer", ("48", "96")), ("copy_batch", ("160", "320"))):
        with open(RESULTS / experiment / "cells.csv", encoding="utf-8") as lines:
            rows = [row for row in csv.DictReader(lines) if row["length"] in lengths]
        assert len(rows) == 10
        for row in rows:
            share_of_seed = int(row["right"]) / int(row["examples"])
            assert share_of_seed >= (0.99 if row["length"] == lengths[0] else 0.95)  # "every one of five seeds"
    nats = defaultdict(list)
    with open(RESULTS / "text_reach" / "losses.csv", encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            nats[row["arm"], row["split"], row["window"]].append(float(row["nats"]))
    perplexity = {key: math.exp(sum(each) / len(each)) for key, each in nats.items()}
    long, rope = (perplexity[arm, "validation", "16384"] for arm in ("near_far", "rope"))
    sliding = perplexity["rope", "validation stride 64", "512"]
    assert f"a perplexity of {long:.1f} in windows of 16,384, where RoPE has {rope:.0f}, and {sliding:.1f} in" in page
    fot = perplexity["fot_near_far", "validation", "16384"]
    assert f"The forgetting transformer in the same layers has {fot:.1f}." in page
    within = [perplexity[arm, "validation", "512"] for arm in ("near_far", "rope")]
    assert "within 512 tokens they have {:.1f} and {:.1f}".format(*within) in page
    forgetting = perplexity["near_far_forgetting", "validation", "16384"]
    assert f"With the forgetting transformer's gates it has {forgetting:.1f}, and context beyond" in page
    with open(RESULTS / "text_gain" / "gains.csv", encoding="utf-8") as lines:
        beyond = [
            float(row["gain"])
            for row in csv.DictReader(lines)
            if (row["arm"], row["range"], row["from"], row["to"]) == ("near_far_forgetting", "place", "512", "16383")
        ]
    assert len(beyond) == 5 and f"what it lowers with the others is {sum(beyond) / 5:.3f} nats" in page


def test_wrong_comparisons_of_copy():
    """-ln(share of right strings) / n^2 at every length, and what the wide models get wrong at 20 and 40 symbols."""
    page = (ROOT / "docs/evidence_copy.md").read_text(encoding="utf-8")
    shares = defaultdict(list)
    for experiment in ("copy_recipe", "copy_wide"):
        with open(RESULTS / experiment / "cells.csv", encoding="utf-8") as lines:
            for row in csv.DictReader(lines):
                shares[row["setting"], row["arm"], int(row["length"])].append(int(row["right"]) / int(row["examples"]))

    def implied(share: float, n: int) -> str:
        return "none" if share == 1 else f"{-1e6 * math.log(share) / n**2:.1f}"

    shown = page.split("<!-- comparisons -->")[1].split("<!-- end of comparisons -->")[0].strip().splitlines()[2:]
    settings = ("copy_20", "wide_20", "copy_6", "wide_6")
    arms = (*((setting, "local_far") for setting in settings), ("copy_6", "tra_plus"))
    for line, arm in zip(shown, arms, strict=True):
        at = sorted(n for setting, name, n in shares if (setting, name) == arm)
        means = {n: sum(shares[*arm, n]) / len(shares[*arm, n]) for n in at}
        assert [cell.strip() for cell in line.strip("|").split("|")][1:] == [implied(means[n], n) for n in at], line
    wrong = defaultdict(int)
    with open(RESULTS / "copy_wide" / "trained_length.csv", encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            wrong[int(row["length"])] += int(row["examples"]) - int(row["right"])
    rates = {n: implied(1 - count / 100_000, n) for n, count in wrong.items()}
    text = " ".join(page.split())
    assert f"{wrong[20]} of 100,000 strings of 20 symbols are wrong, {rates[20]} per million comparisons" in text
    assert f"{wrong[40]} of 40 symbols, {rates[40]}" in text
    predicted = 100 * math.exp(-(320**2) * -math.log(1 - wrong[20] / 100_000) / 20**2)
    measured_at_320 = 100 * sum(shares["wide_20", "local_far", 320]) / 5
    assert f"{predicted:.0f} % would be right at 320 symbols; {measured_at_320:.0f} % are" in text


def test_demo():
    values = measured("demo", "exact_match")

    def cell(task: str, split: str, length: int) -> str:
        shares = [100 * values[task, attention, split, length][0] for attention in ("tra", "rope")]
        return " / ".join(f"{share:.1f} %" if 0 < share < 1 else f"{share:.0f} %" for share in shares)

    (rows,) = tables("docs/results.md", "trained to")
    for row, split in zip(rows, ("iid", "sparse", "dense"), strict=False):
        assert row[1:4] + row[5:] == [cell("flip_flop", split, length) for length in (64, 128, 256, 512)]
    assert rows[3][1:] == [cell("induction", "test", length) for length in (20, 40, 80, 120, 160)]


@pytest.mark.parametrize("experiment", sorted(path.parent.name for path in RESULTS.glob("*/headline.svg")))
def test_figures_of_experiments_are_those_of_their_counts(experiment):
    folder = RESULTS / experiment
    command = f"python -m traformer.reports.overview results/{experiment}"
    for name, svg in pictures(folder).items():
        drawn = (folder / f"{name}.svg").read_text(encoding="utf-8")
        assert drawn == standalone(svg, follow_reader=True), f"results/{experiment} has changed; give `{command}`"
        assert (folder / f"{name}.png").exists()


def test_the_readme_shows_the_headline():
    first_screen = (ROOT / "README.md").read_text(encoding="utf-8")[:1500]
    assert "(results/what_works/headline.svg)" in first_screen and "make demo" in first_screen


def test_the_figures_of_upcycle_are_those_of_its_results():
    """The tables as the command wrote them, what tuning cost, how layers start, what each recalls."""
    page = (ROOT / "docs/upcycle.md").read_text(encoding="utf-8")
    folder = RESULTS / "upcycle"
    for mark, table in (("upcycle", "table.md"), ("every layer", "every_layer/table.md")):
        shown = page.split(f"<!-- {mark} -->")[1].split("<!-- end -->")[0]
        assert shown.strip() == (folder / table).read_text(encoding="utf-8").strip()
    runs = ("layers", "logits", "every_layer/layers", "every_layer/logits", "every_sixth_layer/stage1_2048")
    for run in runs:
        last = [json.loads(line) for line in (folder / f"{run}.jsonl").read_text().splitlines()][-1]
        assert f"{last['tokens']:,} tokens, {last['clock']['cpu_seconds']:,.0f} CPU seconds" in page, run
    starts = [json.loads(line) for line in (folder / "starts.jsonl").read_text().splitlines()]
    for row in (row for row in starts if row["step"] == 24):
        assert f"| {row['lr']:g} | {row['loss']:.3f} |" in page
    found = json.loads((folder / "recall_by_layer.json").read_text())
    for layer in found["chosen"]:
        lost = found["whole"]["log_probability"] - found["without"][layer]["log_probability"]
        assert f"| layer {layer} | {lost:.2f} |" in page


@pytest.mark.parametrize(("page", "names"), [("docs/paper_tables.md", 5), ("README.md", 1)])
def test_the_laptop_tables_are_those_of_the_records(page, names):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert text.count("<!-- laptop: ") == names
    assert filled(text, RESULTS / "reproduce-laptop") == text, "give `python -m traformer.reports.paper_pages`"


def laptop(table: str, part: str) -> dict[tuple[str, str], str]:
    """(method, bucket) -> cell of a part of a laptop table, as "96 % (95–96)"."""
    found: dict[tuple[str, str], str] = {}
    head: list[str] = []
    for line in (RESULTS / "reproduce-laptop" / table / "table.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0].endswith(": exact match"):
            head = cells if cells[0] == f"{part}: exact match" else []
        elif head and len(cells) == len(head):
            found |= {(cells[0], bucket): cell for bucket, cell in zip(head[1:], cells[1:], strict=True)}
    return found


def mean(cell: str) -> str:
    return cell.split(" ")[0]


def test_what_the_readme_says_of_the_laptop_tables():
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    letters, instructions = laptop("copy", "copy_letters"), laptop("instructions", "instructions")
    plus, own, rival = (
        [mean(letters[method, bucket]) for bucket in ("151-200", "251-300")]
        for method in ("tra_plus", "tra_previous", "fot_previous")
    )
    assert (
        f"`tra_plus` keeps {plus[0]} % in 151–200 and {plus[1]} % in 251–300, `tra_previous` {own[0]} and {own[1]} %, "
        f"the forgetting transformer with the same heads {rival[0]} and {rival[1]} %"
    ) in text
    stack, plus_far, rival_far = (
        instructions[method, "451-500"] for method in ("previous_token,tra_far", "tra_plus", "fot_previous")
    )
    low, high = plus_far.split("(")[1].rstrip(")").split("–")
    assert (
        f"`previous_token,tra_far` is right on {mean(stack)} % in 451–500, `tra_plus` on {mean(plus_far)} % "
        f"(two seeds, {low} and {high} %), `fot_previous` on {mean(rival_far)} %"
    ) in text
    verdicts = json.loads((RESULTS / "reproduce-laptop/copy/verdicts.json").read_text(encoding="utf-8"))
    worst = {
        one["claim"].split()[3]: one["numbers"].split()[2] for one in verdicts if one["claim"].startswith("every seed")
    }
    assert f"(at worst {worst['previous_token,tra_far']} % in 251–300)" in text
    assert f"(`tra_previous`, at worst {worst['tra_previous']} %" in text


def test_what_the_readme_says_of_the_demo():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    wrong = measured("demo", "error_per_read")["flip_flop", "rope", "iid", 256][0]
    (row,) = (
        line for line in (RESULTS / "stretch/stretch.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| RoPE | IID | 4,096 |")
    )  # fmt: skip
    errors, reads = row.split("|")[5].replace(",", "").split(" of ")
    assert (
        f"{100 * wrong:.0f} % of reads wrong at 256 tokens and {100 * int(errors) / int(reads):.0f} % at 4,096" in text
    )


def test_what_the_pages_say_of_copy_and_recall():
    """README's rows and the overview of evidence.md against the counts of the experiments."""
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    overview = " ".join((ROOT / "docs/evidence.md").read_text(encoding="utf-8").split())

    def percent(experiment: str, setting: str, arm: str, length: int, split: str = "test") -> str:
        with open(RESULTS / experiment / "cells.csv", encoding="utf-8") as lines:
            shares = [
                float(row["right"]) / int(row["examples"])
                for row in csv.DictReader(lines)
                if (row["setting"], row["arm"], int(row["length"]), row["split"]) == (setting, arm, length, split)
            ]
        assert len(shares) == 5
        return f"{100 * sum(shares) / 5:.0f}"

    plus, without, fire, fot = (
        [percent("what_works", "copy", arm, length) for length in (24, 48)]
        for arm in ("tra_plus", "no_removal", "fire", "fot_equal")
    )
    assert (
        f"copies {plus[0]} % at 4 times and {plus[1]} % at 8 times that length; without removal of keys, 0 %" in readme
    )
    assert without == ["0", "0"] and f"FIRE ({fire[0]} and {fire[1]} %)" in readme
    assert f"our recipe ({fot[0]} and {fot[1]} %)" in readme
    assert f"have {without[0]} % at 4 times the trained length, `tra_plus` {plus[0]} %" in overview
    assert f"FIRE as published has {fire[0]} %, FoT with our recipe {fot[0]} %" in overview
    far = percent("copy_recipe", "copy_6", "local_far", 96), percent("copy_recipe", "copy_20", "local_far", 320)
    assert f"With batches of 64 it is {far[0]} and {far[1]} %" in overview
    rival = percent("copy_recipe", "copy_6", "local_fot", 96)
    assert f"TRA above it copies {far[0]} % at 16 times, the forgetting transformer {rival} %" in readme
