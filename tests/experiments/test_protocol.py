"""The protocol on synthetic results: which rate is chosen, when the grid grows, what intervals and verdicts say."""

from __future__ import annotations

import json

import pytest

from tests.reports.made import measurement
from tests.training.tiny import tiny_config
from traformer.errors import RunError
from traformer.experiments import copy_batch, copy_recipe, copy_wide, recall_in_text, what_works
from traformer.experiments.protocol import (
    FAILS,
    HOLDS,
    UNDECIDED,
    Arm,
    AtLeast,
    Beats,
    Counts,
    EverySeed,
    Place,
    Protocol,
    Setting,
    arms,
    difference_interval,
    seed_interval,
    together,
)
from traformer.experiments.summary import main, write_summary
from traformer.methods import resolve_method
from traformer.models.from_run import build_model_config
from traformer.runs.config import RunConfig
from traformer.runs.folder import RunFolder
from traformer.sweeps.cell import Cell, run_cell
from traformer.sweeps.local import CellState, SweepView
from traformer.sweeps.records import Recording, read_records, restore
from traformer.tasks import build_task

PLACE = Place("copy", "test", 12)
ARM = Arm("a", "tra")


def protocol(**changes) -> Protocol:
    config = RunConfig(task="copy", task_options={"max_length": 3, "vocabulary": 12}, steps=200, log_every=50)
    settings = {"copy": Setting("copy", config, "3,12")}
    return Protocol(settings, (("copy", (ARM, Arm("b", "rope"))),), (), seeds=(10, 11), **changes)


def train(out, cell, loss=1.0):
    """A finished run with this loss at the end."""
    folder = RunFolder(out / cell.name)
    folder.write_config(cell.config, {})
    lines = [{"step": step, "loss": 9.0 if step <= 100 else loss} for step in (50, 100, 150, 200)]
    folder.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder.checkpoints / "step-200").mkdir(parents=True)


def search(out, declared, losses):
    for rate, loss in losses.items():
        for cell in declared.search_cells("copy", ARM, rate):
            train(out, cell, loss)


def test_the_search_takes_the_rate_with_the_lowest_loss_at_the_end(tmp_path):
    declared = protocol(rates=(1e-3, 2e-3, 4e-3, 8e-3))
    assert [cell.config.lr for cell in declared.search(tmp_path, "copy", ARM).missing] == [1e-3, 2e-3, 4e-3, 8e-3]
    search(tmp_path, declared, {1e-3: 0.4, 2e-3: 0.1, 4e-3: 0.2, 8e-3: 0.3})
    found = declared.search(tmp_path, "copy", ARM)
    assert found.rate == 2e-3 and found.losses[2e-3] == pytest.approx(0.1)


def test_an_optimum_on_the_edge_extends_the_grid_until_it_is_inside(tmp_path):
    declared = protocol(rates=(1e-3, 2e-3, 4e-3, 8e-3))
    search(tmp_path, declared, {1e-3: 0.4, 2e-3: 0.3, 4e-3: 0.2, 8e-3: 0.1})
    found = declared.search(tmp_path, "copy", ARM)
    assert found.rate is None and [cell.config.lr for cell in found.missing] == [1.6e-2]
    search(tmp_path, declared, {1.6e-2: 0.05})
    assert [cell.config.lr for cell in declared.search(tmp_path, "copy", ARM).missing] == [3.2e-2]
    search(tmp_path, declared, {3.2e-2: 0.7})
    assert declared.search(tmp_path, "copy", ARM).rate == 1.6e-2


def test_the_grid_is_extended_no_further_than_declared_and_downwards_too(tmp_path):
    declared = protocol(rates=(1e-3, 2e-3, 4e-3, 8e-3), extensions=1)
    search(tmp_path, declared, {1e-3: 0.1, 2e-3: 0.2, 4e-3: 0.3, 8e-3: 0.4})
    assert [cell.config.lr for cell in declared.search(tmp_path, "copy", ARM).missing] == [5e-4]
    search(tmp_path, declared, {5e-4: 0.05})
    assert declared.search(tmp_path, "copy", ARM).rate == 5e-4


def test_a_rate_whose_loss_diverged_is_never_chosen(tmp_path):
    declared = protocol(rates=(1e-3, 2e-3, 4e-3, 8e-3))
    search(tmp_path, declared, {1e-3: 0.4, 2e-3: 0.1, 4e-3: 0.2})
    (diverged,) = declared.search_cells("copy", ARM, 8e-3)
    folder = RunFolder(tmp_path / diverged.name)
    folder.write_config(diverged.config, {})
    assert declared.search(tmp_path, "copy", ARM).missing == [diverged]
    folder.diverged_file.write_text("the loss became nan")
    found = declared.search(tmp_path, "copy", ARM)
    assert found.rate == 2e-3 and found.losses[8e-3] == float("inf")


def test_no_rate_is_chosen_where_every_loss_diverged(tmp_path):
    declared = protocol(rates=(1e-3, 2e-3), extensions=0)
    for cell in [*declared.search_cells("copy", ARM, 1e-3), *declared.search_cells("copy", ARM, 2e-3)]:
        folder = RunFolder(tmp_path / cell.name)
        folder.write_config(cell.config, {})
        folder.diverged_file.write_text("the loss became nan")
    found = declared.search(tmp_path, "copy", ARM)
    assert found.rate is None and not found.missing


def test_a_cell_that_failed_otherwise_leaves_the_search_undecided(tmp_path):
    """A lock that was held or a full disk says nothing about a rate; the other arm is searched all the same."""
    declared = protocol(rates=(1e-3, 2e-3, 4e-3, 8e-3))
    search(tmp_path, declared, {1e-3: 0.4, 4e-3: 0.2, 8e-3: 0.3})
    (failed,) = declared.search_cells("copy", ARM, 2e-3)
    following = declared.next_cells(tmp_path, [failed.name])
    assert {cell.config.attention for cell in following} == {"rope"}
    assert not declared.next_cells(tmp_path, [failed.name, *(cell.name for cell in following)])


def test_the_losses_of_an_edited_experiment_do_not_count(tmp_path):
    search(tmp_path, protocol(rates=(1e-3, 2e-3)), {1e-3: 0.4, 2e-3: 0.1})
    edited = protocol(rates=(1e-3, 2e-3))
    edited.settings["copy"] = Setting("copy", edited.settings["copy"].config.replace(batch_size=7), "3,12")
    assert len(edited.search(tmp_path, "copy", ARM).missing) == 2


def test_training_that_diverges_says_so_in_its_folder_and_its_record(tmp_path, monkeypatch):
    from traformer.training import loop

    monkeypatch.setattr(loop, "learning_rate", lambda step, **_: 1e30)
    cell = Cell("a", tiny_config(), "12", 4)
    with pytest.raises(RunError, match="stopped before using it"):
        run_cell(cell, tmp_path / "runs" / "a", quiet=True)
    folder = RunFolder(tmp_path / "runs" / "a")
    assert "stopped before using it" in folder.diverged_file.read_text()
    Recording(tmp_path / "records.jsonl", SweepView()).changed(CellState(cell, folder, 1.0, 0, status="failed"))
    assert restore([cell], read_records(tmp_path / "records.jsonl"), tmp_path / "elsewhere") == ["a"]
    assert RunFolder(tmp_path / "elsewhere" / "a").diverged_file.read_text() == folder.diverged_file.read_text()


@pytest.mark.parametrize(
    ("losses", "chosen"),
    [
        ({1e-3: 1e-3, 2e-3: 2e-3, 4e-3: 1e-6, 8e-3: 0.4}, 2e-3),  # not the one that happened to err least
        ({1e-3: 0.4, 2e-3: 2e-3, 4e-3: 1e-6, 8e-3: 0.4}, 2e-3),  # the lower of two
        ({1e-3: 0.3, 2e-3: 0.1, 4e-3: 0.2, 8e-3: 0.4}, 2e-3),  # none solves it: the lowest
        ({1e-3: 1e-3, 2e-3: 1e-6, 4e-3: 0.2, 8e-3: 0.4}, None),  # on the edge: the grid is extended
    ],
)
def test_of_rates_that_solve_the_task_the_middle_one_is_taken(tmp_path, losses, chosen):
    declared = protocol(rates=tuple(losses), solved=1e-2)
    search(tmp_path, declared, losses)
    found = declared.search(tmp_path, "copy", ARM)
    assert found.rate == chosen
    assert [cell.config.lr for cell in found.missing] == ([] if chosen else [5e-4])


def test_a_rate_that_is_given_is_not_searched_for(tmp_path):
    declared = copy_batch.PROTOCOL
    names = [f"batch_6-local_far-seed{seed}" for seed in declared.seeds]
    for cells in (declared.cells(), declared.next_cells(tmp_path)):
        assert [cell.name for cell in cells] == names and {cell.config.lr for cell in cells} == {5e-3}
    following = declared.next_cells(tmp_path, failed=names)
    assert {cell.config.lr for cell in following} == {2.5e-3} and len(following) == 5


def test_the_search_sees_the_trained_length_alone_and_seeds_of_its_own():
    for declared in (protocol(), what_works.PROTOCOL):
        assert not set(declared.search_seeds) & set(declared.seeds)
        for setting, wave in declared.waves:
            longest = build_task(
                declared.settings[setting].config.task, declared.settings[setting].config.task_options
            ).length_range[1]
            for cell in declared.search_cells(setting, wave[0], declared.rates[0]):
                assert cell.lengths == str(longest)


def test_the_table_follows_the_search_of_the_wave(tmp_path):
    declared = protocol(rates=(1e-3, 2e-3, 4e-3, 8e-3))
    search(tmp_path, declared, {1e-3: 0.4, 2e-3: 0.1, 4e-3: 0.2, 8e-3: 0.3})
    names = [cell.name for cell in declared.next_cells(tmp_path)]
    assert names[:2] == ["copy-a-seed10", "copy-a-seed11"]
    assert all(name.startswith("search-copy-b-") for name in names[2:]) and len(names) == 6
    every = [*names, *(f"copy-b-seed{seed}" for seed in declared.seeds)]
    for name in every:  # a sweep in which all else fails comes to an end
        assert name not in [cell.name for cell in declared.next_cells(tmp_path, every)]


def test_intervals_over_seeds():
    sure = Counts((512,) * 5, (512,) * 5)
    low, high = seed_interval(sure)
    assert 0.996 < low < 0.999 and high == 1.0  # all right is not certainty
    mixed = Counts((512, 512, 512, 0, 0), (512,) * 5)
    low, high = seed_interval(mixed)
    assert low < 0.25 and high > 0.95 and mixed.worst == 0.0 and mixed.best == 1.0
    low, high = difference_interval(sure, mixed)
    assert low < 0.05 < 0.35 < high
    # One seed: what is left open is the binomial alone, near Clopper and Pearson's 0.44 to 0.56 for 150 of 300.
    low, high = seed_interval(Counts((150,), (300,)))
    assert low == pytest.approx(0.444, abs=0.01) and high == pytest.approx(0.556, abs=0.01)


def test_the_upper_layer_of_near_far_is_tra_far():
    """The pages say so, and `--attention tra_plus,tra_far` is what they recommend."""
    spelled_out = resolve_method("tra_straight_through", recall_in_text.MAIN.options["tra_straight_through"])
    assert spelled_out.is_same(resolve_method("tra_far"))


def test_local_far_is_previous_token_below_tra_far():
    """As `--attention previous_token,tra_far`, which the pages recommend for copy."""
    arm = copy_recipe.LOCAL_FAR
    for spelled_out, name in zip(arm.attention.split(","), ("previous_token", "tra_far"), strict=True):
        assert resolve_method(spelled_out, arm.options[spelled_out]).is_same(resolve_method(name))
    rival = next(arm for arm in copy_recipe.LOCAL_RIVALS if arm.name == "local_fot")
    assert resolve_method("fot", rival.options["fot"]).is_same(resolve_method("fot_far"))  # RIVAL_STACK of the tables


def test_single_answers_count_as_shares_of_their_sequence():
    row = measurement(recall_in_text.RECALL, 128, 0.9980469, "token_accuracy", examples=128)
    assert recall_in_text.PROTOCOL.right(row) == 127.75  # 511 of 512 answers are not all
    assert what_works.PROTOCOL.right(row.replace(metric="exact_match", value=0.9746094, examples=512)) == 499


def counts(*right: int) -> Counts:
    return Counts(right, (512,) * len(right))


@pytest.mark.parametrize(
    ("right", "outcome"),
    [((500,) * 5, HOLDS), ((400,) * 5, FAILS), ((512, 512, 400, 512, 400), UNDECIDED), ((500,) * 4, UNDECIDED)],
)
def test_at_least(right, outcome):
    verdict = AtLeast("H", "claim", "a", (PLACE,), 0.9).judge({("a", PLACE): counts(*right)}, 5)
    assert verdict.outcome == outcome
    assert ("copy at 12" if len(right) == 5 else "a (4 of 5 seeds)") in verdict.numbers


@pytest.mark.parametrize(
    ("right", "outcome"),
    [((510,) * 5, HOLDS), ((512, 512, 512, 512, 500), FAILS), ((510,) * 4, UNDECIDED), ((400,), FAILS)],
)
def test_every_seed(right, outcome):
    verdict = EverySeed("H", "claim", "a", (PLACE,), 0.99).judge({("a", PLACE): counts(*right)}, 5)
    assert verdict.outcome == outcome and "copy at 12" in verdict.numbers
    assert ("of 5 seeds" in verdict.numbers) == (len(right) < 5)
    assert EverySeed("H", "claim", "a", (PLACE,), 0.99).judge({}, 5).outcome == UNDECIDED


def test_beats_needs_every_rival():
    table = {("a", PLACE): counts(*[500] * 5), ("b", PLACE): counts(*[100] * 5), ("c", PLACE): counts(*[490] * 5)}
    assert Beats("H", "claim", "a", ("b",), (PLACE,), 0.1).judge(table, 5).outcome == HOLDS
    assert Beats("H", "claim", "a", ("b", "c"), (PLACE,), 0.1).judge(table, 5).outcome == FAILS
    missing = Beats("H", "claim", "a", ("b", "d"), (PLACE,), 0.1).judge(table, 5)
    assert missing.outcome == UNDECIDED and missing.numbers.endswith("not measured yet: d (0 of 5 seeds)")
    # One rival that is as good decides, whatever else is missing.
    assert Beats("H", "claim", "a", ("c", "d"), (PLACE,), 0.1).judge(table, 5).outcome == FAILS


def test_beats_names_who_is_not_beaten_and_the_closest_of_the_others():
    rights = {"a": 500, "level": 495, "close": 300, "far": 200, "farther": 100}
    table = {(name, PLACE): counts(*[right] * 5) for name, right in rights.items()}
    numbers = Beats("H", "claim", "a", tuple(rights)[1:], (PLACE,), 0.1).judge(table, 5).numbers
    assert [part.split(" of ")[-1].split(" is ")[0] for part in numbers.split("; ")[:2]] == ["level", "close"]
    assert numbers.endswith("; 2 others are further behind")
    assert "others" not in Beats("H", "claim", "a", ("far",), (PLACE,), 0.1).judge(table, 5).numbers


def test_parts_together():
    assert together([HOLDS, HOLDS]) == HOLDS
    assert together([HOLDS, UNDECIDED]) == UNDECIDED
    assert together([UNDECIDED, FAILS]) == FAILS
    assert together([]) == UNDECIDED


def test_table_and_summary_from_run_folders(tmp_path):
    declared = protocol(rates=(1e-3, 2e-3, 4e-3, 8e-3), examples=64)
    search(tmp_path, declared, {1e-3: 0.4, 2e-3: 0.1, 4e-3: 0.2, 8e-3: 0.3})
    for number, cell in enumerate(declared.table_cells("copy", ARM, 2e-3)):
        folder = RunFolder(tmp_path / cell.name)
        folder.write_config(cell.config, {})
        folder.results.write(
            [
                measurement(folder.read_config(), 12, (32 + number) / 64, split="test", chance=0.5),
                measurement(folder.read_config(), 12, 1.0, "token_accuracy", split="test", chance=0.5),
            ]
        )
    assert declared.table(tmp_path) == {("a", PLACE): Counts((32, 33), (64, 64), 0.5)}
    write_summary(declared, tmp_path, tmp_path / "summary")
    assert (tmp_path / "summary" / "cells.csv").read_text().splitlines() == [
        "setting,arm,split,length,seed,right,examples,chance",
        "copy,a,test,12,10,32,64,0.5",
        "copy,a,test,12,11,33,64,0.5",
    ]
    assert "copy,a,0.002,0.1,yes" in (tmp_path / "summary" / "rates.csv").read_text().splitlines()
    assert json.loads((tmp_path / "summary" / "verdicts.json").read_text()) == []
    assert (tmp_path / "summary" / "table.md").read_text().splitlines() == [
        "| copy | 12 | seeds |",
        "|---|---|---|",
        "| `a` | 51 % (50–52) | 2 |",
        "| chance | 50 % |  |",
    ]


def test_only_finished_runs_at_the_chosen_rate_are_in_the_table(tmp_path):
    declared = protocol(rates=(1e-3, 2e-3, 4e-3, 8e-3), examples=64)
    search(tmp_path, declared, {1e-3: 0.4, 2e-3: 0.1, 4e-3: 0.2, 8e-3: 0.3})
    (half, _), (_, other) = (declared.table_cells("copy", ARM, rate) for rate in (2e-3, 4e-3))
    for cell, step in ((half, 100), (other, 200)):  # measured on its way; at a rate that another search has chosen
        folder = RunFolder(tmp_path / cell.name)
        folder.write_config(cell.config, {})
        folder.results.write([measurement(cell.config, 12, 0.5, split="test", step=step)])
    assert declared.table(tmp_path) == {} and not list(declared.measured(tmp_path))
    RunFolder(tmp_path / half.name).results.put([measurement(half.config, 12, 0.5, split="test")])
    assert declared.table(tmp_path) == {("a", PLACE): Counts((32,), (64,))}
    assert [(seed, one.step) for _, _, seed, one in declared.measured(tmp_path)] == [(10, 200)]


def test_summary_as_a_program(tmp_path, capsys):
    assert main(["what_works", str(tmp_path / "nowhere"), str(tmp_path / "results")]) == 0
    assert "not decided" in (tmp_path / "results" / "verdicts.md").read_text()
    assert main(["demo", "x", "y"]) == 2 and "has no PROTOCOL" in capsys.readouterr().err
    assert main([]) == 2
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- what_works -->\nold\n<!-- end -->\nafter <!-- end -->\n")
    assert main(["what_works", str(tmp_path / "nowhere"), str(tmp_path / "results"), str(page)]) == 0
    written = page.read_text()
    assert written.startswith("before\n<!-- what_works -->\n") and written.endswith(
        "<!-- end -->\nafter <!-- end -->\n"
    )
    assert (tmp_path / "results" / "verdicts.md").read_text() in written and "old" not in written
    page.write_text("nothing to fill")
    assert main(["what_works", str(tmp_path / "nowhere"), str(tmp_path / "results"), str(page)]) == 2
    assert "has no lines <!-- what_works -->" in capsys.readouterr().err


@pytest.mark.parametrize(
    "module",
    [what_works, recall_in_text, copy_recipe, copy_wide, copy_batch],
    ids=lambda module: module.__name__.rpartition(".")[2],
)
def test_experiments_are_declared_in_full(module):
    declared = module.PROTOCOL
    assert len(declared.rates) >= 4 and len(declared.seeds) >= 5
    assert declared.examples >= (128 if module is recall_in_text else 512)  # a sequence of recall has four answers
    assert not {0, 1, 2, 3} & set(declared.seeds)  # the seeds that tra_plus was designed with
    known = {(setting, arm.name) for setting, wave in declared.waves for arm in wave}
    for hypothesis in declared.hypotheses:
        rivals = getattr(hypothesis, "rivals", ())
        for place in hypothesis.places:
            assert {(place.setting, name) for name in (hypothesis.arm, *rivals)} <= known
            lengths = declared.settings[place.setting].lengths.split(",")
            assert str(place.length) in lengths
    for setting, wave in declared.waves:
        for arm in wave:
            cell = declared.table_cells(setting, arm, 1e-3)[0]
            build_model_config(cell.config, build_task(cell.config.task, cell.config.task_options))
    assert {verdict.outcome for verdict in declared.verdicts("nowhere")} == {UNDECIDED}
    assert arms("tra") == (Arm("tra", "tra"),)
