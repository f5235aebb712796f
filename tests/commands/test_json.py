"""`--json`: stdout is JSON and nothing else, with the numbers of the table."""

from __future__ import annotations

import json


def printed(outcome):
    assert outcome.status == 0, outcome
    return json.loads(outcome.out)


def test_measuring_commands(tra, runs):
    measured = printed(tra("eval", "tra", "--lengths", "12", "--examples", "4", "--json"))
    assert {row["metric"] for row in measured} >= {"exact_match", "token_accuracy"}
    looked = printed(tra("diagnose", "tra", "rope", "--lengths", "12", "--examples", "2", "--queries", "2", "--json"))
    assert {row["run"] for row in looked} == {"tra", "rope"} and {row["study"] for row in looked} == {"diagnosis"}
    assert (runs / "tra" / "diagnosis" / "diagnosis.json").exists()
    far = printed(tra("stretch", "tra", "--lengths", "24", "--examples", "2", "--split", "iid", "--json"))
    assert {(row["run"], row["length"], row["study"]) for row in far} == {("tra", 24, "stretch")}
    report = printed(tra("report", "tra", "--json"))
    assert {row.get("study") for row in report["measurements"]} >= {"diagnosis", "stretch"} and report["verdicts"] == []
    assert (runs / "tra" / "report.html").samefile(report["page"])
    by_hand = {row["metric"]: row["value"] for row in measured if (row["split"], row["length"]) == ("iid", 12)}
    again = {
        row["metric"]: row["value"]
        for row in report["measurements"]
        if (row["split"], row["length"], row.get("study", "eval")) == ("iid", 12, "eval")
    }
    assert again == by_hand


def test_commands_that_describe(tra, corpus):
    examples = printed(tra("show", "flip_flop", "--length", "8", "--examples", "2", "--start", "5", "--json"))
    assert [one["index"] for one in examples] == [5, 6] and len(examples[0]["input_ids"]) == 8
    assert examples[0]["answers"] and examples[0]["text"].startswith("w ")
    (split,) = printed(tra("data", corpus, "--show", "3", "--json"))[:1]
    assert split["split"] == "train" and split["bytes"] > 0 and len(split["starts"]) == 3
    cells = printed(tra("sweep", "demo", "--list", "--json"))
    assert all(cell["commands"][0].startswith("tra train ") and cell["name"] for cell in cells)
    names = printed(tra("list", "attentions", "--json"))
    assert "tra" in names["attentions"]


def test_a_sweep_that_runs_has_no_json(tra):
    outcome = tra("sweep", "demo", "--json")
    assert outcome.status == 2 and "--json is for --list" in outcome.err
