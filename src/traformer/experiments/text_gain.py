"""Text: what a window of 16,384 gains over sliding windows of 512, on the same tokens.

`text_reach` compares the mean over all tokens, and draws the loss by place in the long window; but the tokens at one
place are other ones than those at another, so that line rises and falls with the text. `text_far` compares recurrences,
but by how far back in the whole text they stood: of those 8,192 to 16,383 tokens back only 18 % have their recurrence
inside the long window at all. Here both readings are sorted by one frame, the windows of 16,384 (`tra eval --frame`):
by place in them, and by the recurrences that they hold. So every gain is a difference on one set of tokens.

The arms are `near_far`, the same with FoT's gates (`near_far_forgetting`), and FoT in the same layers, at the rates
that the searches of `text_reach` chose for them. Seeds 110 to 114 are used nowhere else. Declared before its first run,
after four of five seeds of `near_far_forgetting` had been run in `text_reach`, where two had been read (in both the
long windows were 0.006 nats below the sliding ones).

    tra sweep text_gain --out runs/text_gain --records results/text_gain/records.jsonl
    tra report runs/text_gain --experiment text_gain
    python -m traformer.experiments.summary text_gain runs/text_gain results/text_gain docs/evidence_text.md
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from traformer.experiments.protocol import UNDECIDED, Arm, Protocol, Setting, Verdict
from traformer.experiments.recall_in_text import FOT_NEAR_FAR
from traformer.experiments.recall_in_text import MAIN as NEAR_FAR
from traformer.experiments.summary import csv_text, write_picture, write_verdicts
from traformer.experiments.text_far import BySeed, gain_text, judge_gain
from traformer.experiments.text_reach import FORGETTING, LONGEST, STRIDE, TEXT, WINDOW
from traformer.storage import make_folder, write_atomically

TITLE = "Text: what a long window gains on the same tokens"

ARMS = ((FORGETTING, 3e-3), (NEAR_FAR, 3e-3), (FOT_NEAR_FAR, 6e-3))  # rates chosen by the searches of text_reach


def _setting(rate: float) -> Setting:
    """One setting for each rate; the name says which."""
    return Setting(f"lr{rate:g}", TEXT, str(LONGEST), "perplexity", STRIDE, rate, frame=LONGEST)


PROTOCOL = Protocol(
    settings={setting.name: setting for setting in map(_setting, dict.fromkeys(rate for _, rate in ARMS))},
    waves=tuple((_setting(rate).name, (arm,)) for arm, rate in ARMS),
    hypotheses=(),  # of gains, below
    seeds=(110, 111, 112, 113, 114),
    examples=32,
)
cells, next_cells = PROTOCOL.cells, PROTOCOL.next_cells

Range = tuple[str, int, int]  # "place" or "distance", from, to (both included)
BEYOND: Range = ("place", WINDOW, LONGEST - 1)  # every token that has more before it than the trained window
NEXT: Range = ("place", WINDOW, 4 * WINDOW - 1)
FAR: Range = ("place", 8 * WINDOW, LONGEST - 1)
COPIES: Range = ("distance", WINDOW, 4 * WINDOW - 1)
FAR_COPIES: Range = ("distance", 4 * WINDOW, LONGEST - 1)
# What the table shows: doubling ranges from the trained window on.
SHOWN: dict[str, tuple[Range, ...]] = {
    kind: tuple((kind, 1 << bits, (2 << bits) - 1) for bits in range(9, 14)) for kind in ("place", "distance")
}
HEADS = {"place": "place in the window", "distance": "tokens back of a recurrence"}

Gains = dict[tuple[str, Range], BySeed]  # by arm and range


@dataclass(frozen=True)
class Gain:
    """The long window gains in this range; or gains more there than in another."""

    name: str
    claim: str
    arm: str
    where: Range
    more_than: Range | None = None

    def judge(self, gains: Gains, seeds: int) -> Verdict:
        own = gains.get((self.arm, self.where), {})
        other = None if self.more_than is None else gains.get((self.arm, self.more_than), {})
        if min(len(own), len(own if other is None else other)) < seeds:
            there = f"not measured yet: {self.arm} ({len(own)} of {seeds} seeds)"
            return Verdict(self.name, self.claim, UNDECIDED, there)
        return Verdict(self.name, self.claim, *judge_gain(own, other, paired=True, digits=4))


def _hypotheses() -> tuple[Gain, ...]:
    found = []
    for arm in (NEAR_FAR, FORGETTING, FOT_NEAR_FAR):
        found += [
            (f"{arm.name} uses context beyond its trained window: it gains at places 512 to 16,383", arm, BEYOND, None),
            (f"{arm.name}'s loss keeps falling: it gains more at places 4,096 to 16,383 than at 512 to 2,047", arm,
             FAR, NEXT),
            (f"{arm.name} copies from 512 to 2,047 tokens back", arm, COPIES, None),
            (f"{arm.name} copies from 2,048 to 16,383 tokens back", arm, FAR_COPIES, None),
        ]  # fmt: skip
    return tuple(
        Gain(f"G{number}", claim, arm.name, where, other) for number, (claim, arm, where, other) in enumerate(found, 1)
    )


HYPOTHESES = _hypotheses()


def _rows(out: Path) -> Iterator[tuple[Arm, int, bool, Range, float, int]]:
    """(arm, seed, whether in the long window, range, loss, tokens) of everything measured by place or recurrence."""
    for _, arm, seed, one in PROTOCOL.measured(out):
        kind = {"loss_by_place": "place", "loss_by_recurrence": "distance"}.get(one.metric)
        if kind is not None and one.value is not None and one.protocol.get("frame", LONGEST) == LONGEST:
            where = kind, int(one.at[kind]), int(one.at["to"])
            yield arm, seed, one.size == LONGEST, where, one.value, one.counted


def gains(out: Path) -> Gains:
    """The mean loss in sliding windows less that in the long window, by arm, range and seed."""
    wanted = {BEYOND, NEXT, FAR, COPIES, FAR_COPIES, *SHOWN["place"], *SHOWN["distance"]}
    sums: dict[tuple[str, int, Range], dict[bool, tuple[float, int]]] = {}
    for arm, seed, long, (kind, first, last), loss, tokens in _rows(out):
        for where in wanted:
            if where[0] == kind and where[1] <= first and last <= where[2]:
                readings = sums.setdefault((arm.name, seed, where), {})
                total, count = readings.get(long, (0.0, 0))
                readings[long] = total + loss * tokens, count + tokens
    found: Gains = {}
    for (name, seed, where), readings in sums.items():
        if len(readings) == 2:
            (far, tokens), (sliding, same) = readings[True], readings[False]
            assert tokens == same, f"{name}, seed {seed}, {where}: {tokens} tokens in one reading, {same} in the other"
            found.setdefault((name, where), {})[seed] = (sliding - far) / tokens
    return found


def verdicts(out: str | Path) -> list[Verdict]:
    found = gains(Path(out))
    return [hypothesis.judge(found, len(PROTOCOL.seeds)) for hypothesis in HYPOTHESES]


def table(found: Gains) -> str:
    """For places and for recurrences a line for each arm: its mean gain (lowest to highest seed) in doubling ranges."""
    if not found:
        return "Nothing has been measured yet.\n"
    parts = []
    for kind, ranges in SHOWN.items():
        heads = [f"{low:,}–{high:,}" for _, low, high in ranges]
        lines = [f"| gain in nats, {HEADS[kind]} | {' | '.join(heads)} | seeds |", "|---" * (len(heads) + 2) + "|"]
        for name in dict.fromkeys(name for name, _ in found):
            each = [found.get((name, where), {}) for where in ranges]
            lines.append(f"| `{name}` | {' | '.join(map(gain_text, each))} | {max(map(len, each))} |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def picture(found: Gains, kind: str) -> str:
    """The gain in doubling ranges beyond the trained window, a line for each arm."""
    from traformer.methods import label_of
    from traformer.reports.figures import Figure, Point, Series
    from traformer.reports.svg import figure_svg
    from traformer.runs.metrics import Metric

    series = []
    for name in dict.fromkeys(name for name, _ in found):
        each = [(where, list(found[name, where].values())) for where in SHOWN[kind] if (name, where) in found]
        points = [
            Point(last + 1.0, f"{first:,}-{last:,}", sum(same) / len(same), min(same), max(same), len(same),
                  PROTOCOL.examples)
            for (_, first, last), same in each
        ]  # fmt: skip
        series.append(Series(label_of(name), name, points))
    metric = Metric("gain", f"gain over sliding windows of {WINDOW}, in nats", "Per token, on the same tokens.",
                    section="text", better="higher", along=kind)  # fmt: skip
    figure = Figure(metric, "text", "validation", "text", WINDOW, float(WINDOW),
                    f"{HEADS[kind]} (the end of each range), log scale", series)  # fmt: skip
    return figure_svg(figure, {one.label: number for number, one in enumerate(series)})


def write_summary(out: Path, folder: Path) -> None:
    """gains.csv, table.md, the verdicts, and the gain by place and by recurrence drawn."""
    make_folder(folder)
    found = gains(out)
    rows = [("arm", "range", "from", "to", "seed", "gain")]
    for (name, (kind, low, high)), by_seed in sorted(found.items()):
        rows += [(name, kind, str(low), str(high), str(seed), f"{gain:.6f}") for seed, gain in sorted(by_seed.items())]
    write_atomically(folder / "gains.csv", csv_text(rows))
    write_atomically(folder / "table.md", table(found))
    write_verdicts(verdicts(out), folder)
    for kind, name in (("place", "places"), ("distance", "recurrences")) if found else ():
        write_picture(picture(found, kind), folder / name)
