"""The fuzz campaign itself: every target runs, a fault is found, shrunk and repeated by its seed."""

from __future__ import annotations

import io

import pytest
from hypothesis import strategies as st
from rich.console import Console

from tests.fuzz import __main__ as fuzz
from tests.fuzz.targets import TARGETS, Target


@pytest.mark.parametrize("name", TARGETS)
def test_a_few_problems_of_every_target(name):
    found = fuzz.run_batch(TARGETS[name], campaign=1, batch=0, count=15)
    assert found is None, found.text


def test_a_fault_is_found_shrunk_and_repeated(monkeypatch):
    def check(number):
        assert number < 1000, "too large"

    monkeypatch.setitem(TARGETS, "faulty", Target("faulty", 1, st.integers(0, 10**6), check))
    shown = io.StringIO()
    console = Console(file=shown, width=120)
    findings = fuzz.campaign(7, 300, ["faulty"], None, console)
    assert findings and "case=1000" in findings[0].text and "too large" in findings[0].text
    assert f"--seed 7 --only faulty --batch {findings[0].batch}" in shown.getvalue()
    assert fuzz.campaign(7, 300, ["faulty"], findings[0].batch, console) == [findings[0]]


def test_a_stopped_campaign_says_how_to_continue_and_skips_what_was_solved(monkeypatch):
    solved = []

    def run_batch(target, campaign, batch, count):
        if len(solved) == 3:
            solved.append("stop")
            raise KeyboardInterrupt
        solved.append((target.name, batch))

    monkeypatch.setattr(fuzz, "run_batch", run_batch)
    shown = io.StringIO()
    console = Console(file=shown, width=120)
    names = list(TARGETS)[:2]
    with pytest.raises(SystemExit) as stopped:
        fuzz.campaign(7, 1000, names, None, console)
    assert stopped.value.code == 130 and "--seed 7 --count 1000 --skip 300" in shown.getvalue()
    assert fuzz.campaign(7, 1000, names, None, console, skip=300) == []
    assert [case for case in solved if case != "stop"] == [(name, n) for name, n, _ in fuzz.plan(names, 1000)]


def test_the_plan_has_as_many_problems_as_asked_for_and_meets_every_target_early():
    batches = fuzz.plan(list(TARGETS), 100_000)
    assert abs(sum(size for *_, size in batches) - 100_000) < len(TARGETS)
    assert {name for name, *_ in batches[:150]} == set(TARGETS)
    assert fuzz.batch_seed(1, "a", 0) != fuzz.batch_seed(1, "a", 1) != fuzz.batch_seed(2, "a", 1)


def test_a_wrong_name_is_refused(capsys):
    with pytest.raises(SystemExit):
        fuzz.main(["--only", "nonsense"])
    assert "no target has such a name" in capsys.readouterr().err
