"""Text trained at a window of 512 tokens and read to 16,384: is context beyond the trained window used?

Loss falls with a longer window even for a model that uses none of it, since fewer tokens are near a window's start. So
every model is read twice on the same tokens: in windows of 16,384, and in windows of 512 that move on by 64, where
every token but the first few has 448 to 511 tokens before it. What the long window gains over that is context beyond
the trained one. RoPE, which fails beyond it, is judged by its sliding windows.

Two layers of 128, a BPE of 1,024 entries, 1,000 steps of 8 windows; all 218,000 tokens of validation text. The text is
the built-in one, whose documents are whole source files: names recur over thousands of tokens. $TRAFORMER_TEXT names
another folder. Rates are searched as `protocol.py` says.

The main arm is `near_far`, as in `recall_in_text`: `tra_plus` below, far gates alone above. It was chosen at the
trained window, with a seed that is not used here: after 800 steps at 3e-3 its loss still fell after the first 64 places
of a window of 512 (with two layers and with four), that of RoPE and, after 400 steps, of `tra_plus` did not. The arms
with the equal recipe are given the same: FoT with the same gates, RoPE with the own key hidden in half of the heads and
a temperature.

FoT in the same layers turned out to be below `near_far` (C4). The two differ in two things: the threshold, and the
gates, which are one per query times a count in TRA and one per key in FoT. So both exchanges were declared after that,
and before any run of theirs: `near_far_no_removal` has all keys in the softmax and TRA's gates, `near_far_forgetting`
the threshold and FoT's gates. Each has a search of its own; seeds, steps and size are those of all arms.

Declared last, before their runs: `previous_far` and `fot_previous_far`, in which half of the lower heads of either read
the previous token alone (at the trained window, with a seed that no table has, the loss of `near_far` was then lower).

    tra sweep text_reach --out runs/text_reach --records results/text_reach/records.jsonl
    tra report runs/text_reach --experiment text_reach
    python -m traformer.experiments.summary text_reach runs/text_reach results/text_reach docs/evidence_text.md
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from traformer.experiments.configs import TEXT_SMALL
from traformer.experiments.intervals import difference_of_means
from traformer.experiments.protocol import (
    FAILS,
    HOLDS,
    UNDECIDED,
    Arm,
    Protocol,
    Setting,
    Verdict,
    arms,
    together,
)
from traformer.experiments.recall_in_text import FAR, FOT_NEAR_FAR, NOTHING_REMOVED
from traformer.experiments.recall_in_text import MAIN as NEAR_FAR
from traformer.experiments.summary import csv_text, write_picture, write_rates, write_verdicts
from traformer.storage import write_atomically
from traformer.types import JsonObject

TITLE = "Text: trained at a window of 512, read to 16,384"

WINDOW, LONGEST, STRIDE = 512, 16_384, 64
SETTING = "text"
TEXT = TEXT_SMALL.replace(
    task_options={
        "data": [os.environ.get("TRAFORMER_TEXT", TEXT_SMALL.task_options["data"][0])], "tokenizer": "bpe:1024",
        "length": WINDOW,
    },
    model_options={**TEXT_SMALL.model_options, "num_hidden_layers": 2}, steps=1000, batch_size=8, threads=1,
)  # fmt: skip
MAIN = (NEAR_FAR,)
USUAL = arms("rope")
EQUAL = (FOT_NEAR_FAR, *arms("rope_equal"))
_FORGETTING: JsonObject = {"distance": "forgetting"}
FORGETTING = Arm(
    "near_far_forgetting", NEAR_FAR.attention,
    {"tra_plus": _FORGETTING, "tra_straight_through": {**FAR, **_FORGETTING}},
)  # fmt: skip
PREVIOUS_FAR = Arm("previous_far", "tra_previous,tra_far")
FOT_PREVIOUS_FAR = Arm("fot_previous_far", "fot_previous,fot_far")
PEERS = arms("tra_plus", "fot", "alibi", "tra", "stick_breaking")

PROTOCOL = Protocol(
    settings={SETTING: Setting(SETTING, TEXT, f"{WINDOW},2048,{LONGEST}", "perplexity", STRIDE)},
    waves=(
        *((SETTING, wave) for wave in (MAIN, USUAL, EQUAL[:1], EQUAL[1:])),
        *((SETTING, (arm,)) for arm in (FORGETTING, PREVIOUS_FAR, FOT_PREVIOUS_FAR, *PEERS, NOTHING_REMOVED)),
    ),
    hypotheses=(),  # of losses, below
    rates=(7.5e-4, 1.5e-3, 3e-3, 6e-3),
    examples=32,
    search_examples=4,
)
cells, next_cells = PROTOCOL.cells, PROTOCOL.next_cells

Reading = tuple[str, int]  # split and window
LONG: Reading = ("validation", LONGEST)
SLIDING: Reading = (f"validation stride {STRIDE}", WINDOW)
SHORT: Reading = ("validation", WINDOW)
# Pictures: the arms drawn by place, and those whose mean in sliding windows is a level line beside them.
PICTURES = {
    "places": (("near_far", "rope", *(arm.name for arm in PEERS)), ("rope",)),
    "exchanged": (
        (
            "near_far",
            *(arm.name for arm in (FORGETTING, FOT_NEAR_FAR, NOTHING_REMOVED, PREVIOUS_FAR, FOT_PREVIOUS_FAR)),
        ),
        ("near_far",),
    ),
}
READINGS = {SHORT: "windows of 512", SLIDING: "sliding windows of 512", LONG: "windows of 16,384"}


@dataclass(frozen=True)
class LowerLoss:
    """One arm in one reading has a lower loss than each rival in its own, on the same text: mean over seeds."""

    name: str
    claim: str
    arm: str
    reading: Reading
    rivals: tuple[tuple[str, Reading], ...]

    def judge(self, losses: Losses, seeds: int) -> Verdict:
        outcomes, numbers = [], []
        own = losses.get((self.arm, self.reading), {})
        for rival, reading in self.rivals:
            other = losses.get((rival, reading), {})
            missing = [f"{arm} ({len(found)} of {seeds} seeds)" for arm, found in ((self.arm, own), (rival, other))
                       if len(found) < seeds]  # fmt: skip
            if missing:
                outcomes.append(UNDECIDED)
                numbers.append("not measured yet: " + ", ".join(dict.fromkeys(missing)))
                continue
            low, high = difference(own, other, paired=rival == self.arm)
            outcomes.append(HOLDS if high < 0 else FAILS if low > 0 else UNDECIDED)
            mean, theirs = (sum(one.values()) / len(one) for one in (own, other))
            numbers.append(
                f"{mean:.4f} less {theirs:.4f} of {rival} in {READINGS[reading]} is {mean - theirs:+.4f} nats "
                f"({low:+.4f} to {high:+.4f})"
            )
        return Verdict(self.name, self.claim, together(outcomes), "; ".join(numbers))


Losses = dict[tuple[str, Reading], dict[int, float]]  # nats per token by seed

HYPOTHESES = (
    LowerLoss("C1", "near_far uses context beyond its trained window: 16,384 against its own sliding windows",
              "near_far", LONG, (("near_far", SLIDING),)),
    LowerLoss("C2", "near_far in windows of 16,384 is below RoPE in sliding windows", "near_far", LONG,
              (("rope", SLIDING),)),
    LowerLoss("C3", "near_far in windows of 16,384 is below every method as published in the same windows", "near_far",
              LONG, tuple((arm.name, LONG) for arm in PEERS)),
    LowerLoss("C4", "near_far in windows of 16,384 is below FoT and RoPE with the equal recipe, however these are read",
              "near_far", LONG, tuple((arm.name, reading) for arm in EQUAL for reading in (LONG, SLIDING))),
    LowerLoss("C5", "the threshold helps: near_far is below itself without removal, both in windows of 16,384",
              "near_far", LONG, ((NOTHING_REMOVED.name, LONG),)),
    LowerLoss("C6", "FoT's gates help: near_far_forgetting is below near_far, both in windows of 16,384",
              FORGETTING.name, LONG, (("near_far", LONG),)),
    LowerLoss("C7", "the threshold helps with FoT's gates: near_far_forgetting is below FoT in the same layers",
              FORGETTING.name, LONG, ((FOT_NEAR_FAR.name, LONG),)),
    LowerLoss("C8", "and uses context beyond its trained window: 16,384 against its own sliding windows",
              FORGETTING.name, LONG, ((FORGETTING.name, SLIDING),)),
    LowerLoss("C9", "exact marks help: previous_far is below near_far, both in windows of 16,384",
              PREVIOUS_FAR.name, LONG, (("near_far", LONG),)),
    LowerLoss("C10", "and below FoT with the same heads", PREVIOUS_FAR.name, LONG, ((FOT_PREVIOUS_FAR.name, LONG),)),
    LowerLoss("C11", "previous_far uses context beyond its trained window: 16,384 against its own sliding windows",
              PREVIOUS_FAR.name, LONG, ((PREVIOUS_FAR.name, SLIDING),)),
)  # fmt: skip


def difference(first: dict[int, float], second: dict[int, float], paired: bool) -> tuple[float, float]:
    """95 % interval of the first mean less the second, over seeds; paired: the same seeds on both sides."""
    a, b = ([one[seed] for seed in sorted(one)] for one in (first, second))
    return difference_of_means(a, b, paired)


def losses(out: Path) -> Losses:
    found: Losses = {}
    for _, arm, seed, one in PROTOCOL.measured(out):
        if one.metric == "perplexity" and one.value is not None:
            found.setdefault((arm.name, (one.split, int(one.length))), {})[seed] = math.log(one.value)
    return found


def verdicts(out: str | Path) -> list[Verdict]:
    found = losses(Path(out))
    return [hypothesis.judge(found, len(PROTOCOL.seeds)) for hypothesis in HYPOTHESES]


# The small files that the page shows ------------------------------------------------------------------------------


def write_summary(out: Path, folder: Path) -> None:
    """losses.csv, places.csv, rates.csv, table.md, verdicts, and loss by place drawn, a line for each arm."""
    folder.mkdir(parents=True, exist_ok=True)
    found = losses(out)
    rows = [("arm", "split", "window", "seed", "nats")]
    for (arm, (split, window)), by_seed in found.items():
        rows += [(arm, split, str(window), str(seed), f"{loss:.6f}") for seed, loss in sorted(by_seed.items())]
    places = [("arm", "seed", "place", "to", "nats")]
    for _, arm_of, seed, one in PROTOCOL.measured(out):
        if one.metric == "loss_by_place" and (one.split, int(one.length)) == LONG and one.value is not None:
            places.append((arm_of.name, str(seed), str(one.at["place"]), str(one.at["to"]), f"{one.value:.6f}"))
    write_atomically(folder / "losses.csv", csv_text(rows))
    write_atomically(folder / "places.csv", csv_text(places))
    write_atomically(folder / "table.md", table(found))
    write_rates(PROTOCOL, out, folder)
    write_verdicts(verdicts(out), folder)
    for name, (drawn, levels) in PICTURES.items():
        chosen = [row for row in places[1:] if row[0] in drawn]
        if chosen:
            write_picture(picture(chosen, found, levels), folder / name)


def table(found: Losses) -> str:
    """A line for each method: mean loss (lowest to highest seed) in each reading."""
    if not found:
        return "Nothing has been measured yet.\n"
    lines = [f"| nats per token | {' | '.join(READINGS.values())} | seeds |", "|---" * (len(READINGS) + 2) + "|"]
    for name in dict.fromkeys(arm for arm, _ in found):
        each = [sorted(found.get((name, reading), {}).values()) for reading in READINGS]
        shown = [f"{sum(one) / len(one):.3f} ({one[0]:.3f}–{one[-1]:.3f})" if one else "" for one in each]
        lines.append(f"| `{name}` | {' | '.join(shown)} | {max(map(len, each))} |")
    return "\n".join(lines) + "\n"


def picture(places: Sequence[Sequence[str]], found: Losses, levels: Sequence[str]) -> str:
    """Loss by place in the longest window, the trained window marked; from the trained window's quarter on.

    The mean in sliding windows is a level line of its own for `levels`: each token then has nearly the whole trained
    window before it, wherever it stands.
    """
    from traformer.methods import label_of
    from traformer.reports.figures import Figure, Point, Series
    from traformer.reports.style import LIGHT
    from traformer.reports.svg import figure_svg
    from traformer.runs.metrics import METRICS

    def point(x: float, label: str, same: Sequence[float]) -> Point:
        return Point(x, label, sum(same) / len(same), min(same), max(same), len(same), PROTOCOL.examples)

    by_place: dict[str, dict[tuple[int, int], list[float]]] = {}
    for arm, _, first, last, loss in places:
        if int(first) >= WINDOW // 4:
            by_place.setdefault(arm, {}).setdefault((int(first), int(last)), []).append(float(loss))
    series, styles = [], {}
    for number, (arm, lines) in enumerate(by_place.items()):
        points = [point(last + 1.0, f"{first:,}-{last:,}", same) for (first, last), same in sorted(lines.items())]
        long = Series(label_of(arm), arm, points)
        series.append(long)
        styles[long.label] = number
        sliding = list(found.get((arm, SLIDING), {}).values())
        if sliding and arm in levels:
            ends = [point(float(x), "sliding", sliding) for x in (WINDOW, LONGEST)]
            level = Series(f"{long.label}, sliding", arm, ends)
            series.append(level)
            styles[level.label] = number + len(LIGHT)  # the same colour, another marker and dash
    figure = Figure(METRICS["loss_by_place"], SETTING, "validation", "text", WINDOW, float(WINDOW),
                    "place in the window (the end of each range), log scale", series)  # fmt: skip
    return figure_svg(figure, styles)
