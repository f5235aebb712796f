"""Text read beyond its window: the comparison of losses, and cells that are read in sliding windows, too."""

import pytest

from traformer.experiments import text_reach
from traformer.experiments.protocol import FAILS, HOLDS, UNDECIDED
from traformer.experiments.text_reach import LONG, SHORT, SLIDING, LowerLoss, difference
from traformer.runs.config import RunConfig
from traformer.runs.folder import RunFolder
from traformer.sweeps.cell import Cell, is_done, run_cell

SEEDS = (10, 11, 12)
CLAIM = LowerLoss("C", "a is below b", "a", LONG, (("b", SLIDING),))


def by_seed(*values):
    return dict(zip(SEEDS, values, strict=True))


@pytest.mark.parametrize(
    "own,other,outcome",
    [
        (by_seed(1.0, 1.1, 1.2), by_seed(1.5, 1.6, 1.7), HOLDS),
        (by_seed(1.5, 1.6, 1.7), by_seed(1.0, 1.1, 1.2), FAILS),
        (by_seed(1.0, 1.5, 2.0), by_seed(1.1, 1.6, 1.9), UNDECIDED),
        ({10: 1.0}, by_seed(1.5, 1.6, 1.7), UNDECIDED),
    ],
)
def test_a_lower_loss_must_be_lower_over_the_whole_interval(own, other, outcome):
    verdict = CLAIM.judge({("a", LONG): own, ("b", SLIDING): other}, len(SEEDS))
    assert verdict.outcome == outcome
    assert ("1 of 3 seeds" in verdict.numbers) == (len(own) == 1)


def test_readings_of_one_model_are_compared_seed_by_seed():
    """Seeds differ by far more than the readings do: only the pairing shows it."""
    sliding = by_seed(1.0, 2.0, 3.0)
    long = {seed: loss - 0.01 for seed, loss in sliding.items()}
    assert difference(long, sliding, paired=True) == pytest.approx((-0.01, -0.01))
    low, high = difference(long, sliding, paired=False)
    assert low < 0 < high


def test_the_table_and_the_picture():
    losses = {("tra_plus", SHORT): by_seed(2.0, 2.1, 2.2), ("tra_plus", LONG): by_seed(1.8, 1.9, 2.0)}
    assert "| `tra_plus` | 2.100 (2.000–2.200) |  | 1.900 (1.800–2.000) | 3 |" in text_reach.table(losses)
    places = [("rope", "10", str(2**n), str(2 ** (n + 1) - 1), f"{2 - n / 10}") for n in range(6, 14)]
    drawn = text_reach.picture(places, losses, ("rope",))
    assert "<svg" in drawn and ">RoPE<" in drawn and "sliding" not in drawn
    drawn = text_reach.picture(places, {("rope", SLIDING): by_seed(1.5, 1.6, 1.7)}, ("rope",))
    assert ">RoPE, sliding<" in drawn


def test_a_cell_with_a_stride_is_read_twice(tmp_path):
    (tmp_path / "text.txt").write_text("one two three four five six seven\n" * 3000)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = RunConfig(
        task="text", task_options={"data": [str(tmp_path / "text.txt")], "tokenizer": "bytes", "length": 16},
        attention="tra_plus", model_options=sizes, steps=2, batch_size=2, threads=1,
    )  # fmt: skip
    cell = Cell("text", config, "16,32", 1, stride=4)
    assert Cell.from_dict(cell.to_dict()) == cell
    assert cell.commands("out")[-1] == "tra eval out --lengths 16 --examples 1 --stride 4"
    run_cell(Cell("text", config, "16,32", 1), tmp_path / "run", quiet=True)
    folder = RunFolder(tmp_path / "run")
    assert is_done(Cell("text", config, "16,32", 1), folder) and not is_done(cell, folder)
    run_cell(cell, tmp_path / "run", quiet=True)
    assert is_done(cell, folder)
    assert {(one.split, one.length) for one in folder.results.read()} == {
        ("validation", 16), ("validation", 32), ("validation stride 4", 16),
    }  # fmt: skip
