"""The protocol of a comparison: what is claimed, tried and counted, declared before the first run. Loads without torch.

An experiment declares settings (a task at a size), arms (attentions with options), a grid of rates, seeds and
hypotheses, and is committed before it runs. `Protocol.next_cells` then goes through it, arm by arm:

1.  Every rate of the grid, with search seeds of its own. The rate with the lowest loss at the end of training is
    chosen; training draws fresh examples, so that this is the loss on the training distribution, and nothing beyond
    the trained length is looked at. An optimum on the edge of the grid extends the grid on that side. Where several
    rates solve the task (`solved`), their losses differ by single wrong answers: the middle one of these is chosen.
2.  The table's seeds, none of which the search or the design of a method has seen, at the chosen rate.

`Protocol.verdicts` compares what was measured with each hypothesis: it holds, does not hold, or is not decided.
Intervals are over seeds and sequences (`seed_interval`): seeds are drawn anew with replacement, and each one's accuracy
from what its sequences leave open; the spread of these means is widened as Student's t is for so few seeds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from traformer.experiments.intervals import widened
from traformer.runs.config import RunConfig
from traformer.runs.folder import RunFolder
from traformer.runs.measurements import Measurement
from traformer.sweeps.cell import Cell, is_done, is_made_for
from traformer.types import JsonObject

HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "not decided"
DRAWS = 20_000  # of the bootstrap
SEARCH_STEPS = 100  # at the end of training, over which the loss of a search run is averaged


@dataclass(frozen=True)
class Verdict:
    """What the measurements say about one hypothesis."""

    name: str
    claim: str
    outcome: str  # HOLDS, FAILS or UNDECIDED
    numbers: str  # the figures behind it, in one line


@dataclass(frozen=True)
class Arm:
    """One line of the table: an attention with options, under a name of its own."""

    name: str
    attention: str
    options: JsonObject = field(default_factory=dict)


def arms(*names: str) -> tuple[Arm, ...]:
    """Arms that are attentions or named configurations as they are."""
    return tuple(Arm(name, name) for name in names)


@dataclass(frozen=True)
class Setting:
    """One task at one size, and the lengths it is tested at."""

    name: str
    config: RunConfig
    lengths: str
    metric: str = "exact_match"
    stride: int | None = None  # of text, see Cell
    rate: float | None = None  # for every arm, where an earlier search has chosen it: then there is none here
    frame: int | None = None  # of text, see Cell


@dataclass(frozen=True)
class Place:
    """A column of the table: where an arm is measured."""

    setting: str
    split: str
    length: int

    def __str__(self) -> str:
        split = "" if self.split == "test" else f" ({self.split})"
        return f"{self.setting}{split} at {self.length}"


# Statistics -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counts:
    """One arm at one place: per seed how many of the sequences were right.

    Where several answers of a sequence are scored one by one, a sequence counts as the share of these that is right. It
    still counts as one: answers of one sequence are not independent.
    """

    right: tuple[float, ...]
    total: tuple[int, ...]
    chance: float | None = None

    @property
    def mean(self) -> float:
        return sum(k / n for k, n in zip(self.right, self.total, strict=True)) / len(self.right)

    @property
    def worst(self) -> float:
        return min(k / n for k, n in zip(self.right, self.total, strict=True))

    @property
    def best(self) -> float:
        return max(k / n for k, n in zip(self.right, self.total, strict=True))


def seed_draws(counts: Counts, seed: int = 0) -> NDArray[np.float64]:
    """Means over seeds of a two-level bootstrap, [DRAWS], some of them below 0 or above 1.

    Seeds are drawn with replacement; a drawn seed's accuracy is drawn from Beta(k + 1/2, n - k + 1/2), so that 512 of
    512 is not taken for certainty. The means are spread as Student's t has it: five resampled values alone cover the
    true mean in 84 % of cases, not in 95 %.
    """
    generator = np.random.default_rng(seed)
    right, total = np.array(counts.right), np.array(counts.total)
    chosen = generator.integers(len(right), size=(DRAWS, len(right)))
    drawn = generator.beta(right[chosen] + 0.5, total[chosen] - right[chosen] + 0.5).mean(axis=1)
    return widened(drawn, len(right))


def seed_interval(counts: Counts) -> tuple[float, float]:
    """95 % interval of the mean accuracy over seeds; two-sided."""
    return _middle(seed_draws(counts), 0.0)


def difference_interval(first: Counts, second: Counts) -> tuple[float, float]:
    """95 % interval of the first mean less the second; two-sided. The two are resampled independently."""
    return _middle(seed_draws(first, 0) - seed_draws(second, 1), -1.0)


def _middle(draws: NDArray[np.float64], least: float) -> tuple[float, float]:
    """The middle 95 % of the draws, within what is possible: `least` to 1."""
    low, high = np.quantile(draws, [0.025, 0.975]).clip(least, 1.0)
    return float(low), float(high)


# Hypotheses -----------------------------------------------------------------------------------------------------

Table = dict[tuple[str, Place], Counts]  # (arm, place) -> counts


class Hypothesis:
    """A claim with its threshold; `judge` compares it with the table."""

    name: str
    claim: str

    def judge(self, table: Table, seeds: int) -> Verdict:
        raise NotImplementedError


@dataclass(frozen=True)
class Reaches(Hypothesis):
    """The arm reaches `threshold` at every place; what that means for one place is `judge_place`'s."""

    name: str
    claim: str
    arm: str
    places: tuple[Place, ...]
    threshold: float

    def judge(self, table: Table, seeds: int) -> Verdict:
        outcomes, numbers, missing = [], [], dict[str, int]()
        for place in self.places:
            counts = table.get((self.arm, place))
            there = 0 if counts is None else len(counts.right)
            if there < seeds:
                missing[self.arm] = there
            outcome, figures = (UNDECIDED, "") if counts is None else self.judge_place(counts, there >= seeds)
            outcomes.append(outcome)
            numbers += [f"{place}: {figures}"] if figures else []
        return Verdict(self.name, self.claim, together(outcomes), "; ".join(numbers + _not_measured(missing, seeds)))

    def judge_place(self, counts: Counts, complete: bool) -> tuple[str, str]:
        """Outcome and figures at one place; `complete`: all seeds are there."""
        raise NotImplementedError


class AtLeast(Reaches):
    """The arm's mean accuracy is at least `threshold`: the lower bound is, or the upper one is not."""

    def judge_place(self, counts: Counts, complete: bool) -> tuple[str, str]:
        if not complete:
            return UNDECIDED, ""
        low, high = seed_interval(counts)
        outcome = HOLDS if low >= self.threshold else FAILS if high < self.threshold else UNDECIDED
        return outcome, f"{percent(counts.mean)} ({percent(low)} to {percent(high)})"


class EverySeed(Reaches):
    """Each single seed of the arm is right on at least `threshold` of its sequences. One that is not decides."""

    def judge_place(self, counts: Counts, complete: bool) -> tuple[str, str]:
        outcome = FAILS if counts.worst < self.threshold else HOLDS if complete else UNDECIDED
        shares = sorted(k / n for k, n in zip(counts.right, counts.total, strict=True))
        return outcome, ", ".join(map(percent, shares))


@dataclass(frozen=True)
class Beats(Hypothesis):
    """The arm is at least `margin` above every rival at every place: so is the lower bound of the difference."""

    name: str
    claim: str
    arm: str
    rivals: tuple[str, ...]
    places: tuple[Place, ...]
    margin: float

    def judge(self, table: Table, seeds: int) -> Verdict:
        outcomes, numbers, missing = [], [], dict[str, int]()
        for place in self.places:
            own = table.get((self.arm, place))
            against = []
            for rival in self.rivals:
                other = table.get((rival, place))
                short = {
                    name: 0 if counts is None else len(counts.right)
                    for name, counts in ((self.arm, own), (rival, other))
                    if counts is None or len(counts.right) < seeds
                }
                if own is None or other is None or short:
                    outcomes.append(UNDECIDED)
                    missing.update(short)
                    continue
                against.append(_against(place, own, rival, other, self.margin))
            outcomes += [one.outcome for one in against]
            numbers += _closest(against)
        return Verdict(self.name, self.claim, together(outcomes), "; ".join(numbers + _not_measured(missing, seeds)))


@dataclass(frozen=True)
class _Difference:
    """An arm against one rival at one place."""

    low: float  # the lower bound of what the arm is ahead by
    outcome: str
    numbers: str


def _against(place: Place, own: Counts, rival: str, other: Counts, margin: float) -> _Difference:
    low, high = difference_interval(own, other)
    outcome = HOLDS if low >= margin else FAILS if high < margin else UNDECIDED
    numbers = (
        f"{place}: {percent(own.mean)} less {percent(other.mean)} of {rival} "
        f"is {points(own.mean - other.mean)} points ({points(low)} to {points(high)})"
    )
    return _Difference(low, outcome, numbers)


def _closest(against: Sequence[_Difference]) -> list[str]:
    """The figures of every rival that is not beaten, and of the closest that is; of the rest, how many there are."""
    beaten = sorted((one for one in against if one.outcome == HOLDS), key=lambda one: one.low)
    shown = [one.numbers for one in against if one.outcome != HOLDS] + [one.numbers for one in beaten[:1]]
    left = len(beaten) - 1
    return shown + ([f"{left} other{'s are' if left > 1 else ' is'} further behind"] if left > 0 else [])


def together(outcomes: Sequence[str]) -> str:
    """Of parts that all have to hold: one that does not decides, then one that is not decided."""
    return FAILS if FAILS in outcomes else UNDECIDED if UNDECIDED in outcomes or not outcomes else HOLDS


def _not_measured(missing: dict[str, int], seeds: int) -> list[str]:
    """One entry about the arms that lack seeds, if there are any."""
    if not missing:
        return []
    return ["not measured yet: " + ", ".join(f"{arm} ({there} of {seeds} seeds)" for arm, there in missing.items())]


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def points(share: float) -> str:
    return f"{100 * share:+.1f}"


# The protocol ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Search:
    """How far the search for a rate has come: the rate chosen, or None and the cells it still needs."""

    rate: float | None
    losses: dict[float, float]  # by rate, of the runs that are finished
    missing: list[Cell]


@dataclass(frozen=True)
class Protocol:
    """An experiment's declaration, and the way through it."""

    settings: dict[str, Setting]
    waves: tuple[tuple[str, tuple[Arm, ...]], ...]  # (setting, arms) in the order in which they run
    hypotheses: tuple[Hypothesis, ...]
    rates: tuple[float, ...] = (1.25e-3, 2.5e-3, 5e-3, 1e-2)
    rate_factor: float = 2.0  # by which the grid is extended
    extensions: int = 3  # at most, on either side
    search_seeds: tuple[int, ...] = (200,)
    seeds: tuple[int, ...] = (10, 11, 12, 13, 14)
    examples: int = 512
    search_examples: int = 64
    solved: float = 0.0  # rates whose loss is not above this are equally good

    def cells(self) -> list[Cell]:
        """The first cells; `next_cells` gives those that follow from what they measure."""
        name, wave = self.waves[0]
        given = self.settings[name].rate
        if given is not None:
            return [cell for arm in wave for cell in self.table_cells(name, arm, given)]
        return [cell for arm in wave for rate in self.rates for cell in self.search_cells(name, arm, rate)]

    def next_cells(self, out: str | Path, failed: Sequence[str] = ()) -> list[Cell]:
        """What can run now, given what `out` holds: the cells of the first wave that is not complete.

        `failed`: names of cells that this sweep has tried in vain. A rate whose loss diverged counts as one with
        infinite loss; one that failed otherwise says nothing, so that the arm's table does not start.
        """
        out = Path(out)
        for setting, wave in self.waves:
            found: list[Cell] = []
            for arm in wave:
                search = self.search(out, setting, arm)
                found += search.missing if search.rate is None else self.table_cells(setting, arm, search.rate)
            waiting = [
                cell for cell in found if cell.name not in failed and not is_done(cell, RunFolder(out / cell.name))
            ]
            if waiting:
                return waiting
        return []

    def search_cells(self, setting: str, arm: Arm, rate: float) -> list[Cell]:
        """One rate of the search, measured at the trained length alone."""
        shortest = self.settings[setting].lengths.split(",")[0]
        return [
            Cell(f"search-{setting}-{arm.name}-lr{rate:g}-seed{seed}", self._config(setting, arm, rate, seed), shortest,
                 self.search_examples)
            for seed in self.search_seeds
        ]  # fmt: skip

    def table_cells(self, setting: str, arm: Arm, rate: float) -> list[Cell]:
        given = self.settings[setting]
        return [
            Cell(f"{setting}-{arm.name}-seed{seed}", self._config(setting, arm, rate, seed), given.lengths,
                 self.examples, given.stride, given.frame)
            for seed in self.seeds
        ]  # fmt: skip

    def _config(self, setting: str, arm: Arm, rate: float, seed: int) -> RunConfig:
        return self.settings[setting].config.replace(
            attention=arm.attention, attention_options=arm.options, lr=rate, seed=seed
        )

    def search(self, out: Path, setting: str, arm: Arm) -> Search:
        """How far the search for an arm's rate has come; at its end at once where the setting gives a rate."""
        if self.settings[setting].rate is not None:
            return Search(self.settings[setting].rate, {}, [])
        grid = list(self.rates)
        limit = self.rate_factor**self.extensions * 1.001
        while True:
            losses: dict[float, float] = {}
            missing: list[Cell] = []
            for rate in grid:
                cells = self.search_cells(setting, arm, rate)
                runs = [_final_loss(cell, out) for cell in cells]
                finished = [loss for loss in runs if loss is not None]
                if len(finished) == len(runs):
                    losses[rate] = sum(finished) / len(finished)
                missing += [cell for cell, loss in zip(cells, runs, strict=True) if loss is None]
            if missing:
                return Search(None, losses, missing)
            best = self._best(losses)
            below, above = best / self.rate_factor, best * self.rate_factor
            if best == min(grid) and min(self.rates) / below <= limit:
                grid.append(below)
            elif best == max(grid) and above / max(self.rates) <= limit:
                grid.append(above)
            else:
                return Search(best if isfinite(losses[best]) else None, losses, [])

    def _best(self, losses: dict[float, float]) -> float:
        """The rate with the lowest loss, or the middle one of those that solve the task, the lower of two."""
        solving = sorted(rate for rate, loss in losses.items() if loss <= self.solved)
        return solving[(len(solving) - 1) // 2] if solving else min(losses, key=lambda rate: losses[rate])

    def measured(self, out: str | Path) -> Iterator[tuple[str, Arm, int, Measurement]]:
        """(setting, arm, seed, measurement) of everything measured at the table's seeds, after the last step.

        A run at another rate than the one that the search has chosen is passed over.
        """
        out = Path(out)
        for setting, wave in self.waves:
            steps = self.settings[setting].config.steps
            for arm in wave:
                rate = self.search(out, setting, arm).rate
                for seed in self.seeds:
                    folder = RunFolder(out / f"{setting}-{arm.name}-seed{seed}")
                    if not folder.is_run() or rate not in (None, folder.read_config().lr):
                        continue
                    for one in folder.results.read():
                        if (one.study, one.examples, one.step) == ("eval", self.examples, steps):
                            yield setting, arm, seed, one

    def rows(self, out: str | Path) -> Iterator[tuple[str, Arm, int, Measurement]]:
        """What `measured` gives in the settings' metrics."""
        for setting, arm, seed, one in self.measured(out):
            if one.metric == self.settings[setting].metric and not one.is_of_group:
                yield setting, arm, seed, one

    def right(self, row: Measurement) -> float:
        """How many of a measurement's sequences were right; records keep seven digits of the share."""
        return round((row.value or 0.0) * self.examples, 2)

    def table(self, out: str | Path) -> Table:
        """Everything measured so far at the table's seeds."""
        found: dict[tuple[str, Place], list[tuple[float, float | None]]] = {}
        for setting, arm, _, row in self.rows(out):
            place = Place(setting, row.split, int(row.length))
            found.setdefault((arm.name, place), []).append((self.right(row), row.chance))
        return {
            key: Counts(tuple(right for right, _ in cells), (self.examples,) * len(cells), cells[0][1])
            for key, cells in found.items()
        }

    def verdicts(self, out: str | Path) -> list[Verdict]:
        table = self.table(out)
        return [hypothesis.judge(table, len(self.seeds)) for hypothesis in self.hypotheses]


def _final_loss(cell: Cell, out: Path) -> float | None:
    """Mean training loss over the last SEARCH_STEPS steps of a finished run; None if it is not finished."""
    folder = RunFolder(out / cell.name)
    if not is_made_for(cell, folder):
        return None
    rows = folder.read_metrics()
    if not rows or rows[-1]["step"] < cell.config.steps:
        return float("inf") if folder.diverged_file.exists() else None
    last = [row["loss"] for row in rows if row["step"] > cell.config.steps - SEARCH_STEPS]
    return sum(last) / len(last)
