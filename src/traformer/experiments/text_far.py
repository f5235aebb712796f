"""Text beyond its window: where is the far context lost, and what teaches a model to use it?

`text_reach` shows that `near_far`, trained at a window of 512, gains nothing in the mean by windows of 16,384 over
sliding windows of 512. Here such models are judged by recurrence: by the loss of tokens whose last four predecessors
stood in the text before, by how far back they did. Such a token can be copied, unless the model does not use the far
context. The gain of a distance is the loss there in sliding windows, which leave it out, less that in long ones.

Four answers are possible, and each has an arm that differs from `near_far` in one thing:

- gates: the upper layer's heads forget. `no_distance` has no gates there, nothing but the threshold.
- keys that do not matter: more keys share a softmax than in training. In `sharpening` the n-th token's scores are
  multiplied by n^p, p learned for each head; in `growing` its threshold is 0.25 sqrt(2 log n).
- training never pays for looking far: in the setting `long` windows of 2,048 are trained, as many tokens a step.

Rate, steps and size are those that the search of `text_reach` chose for `near_far`; no arm has a search of its own.
Seeds 80 to 84 are used nowhere else. Declared before its first run, and after the recurrences of `fot_near_far` in
`text_reach` were read: there the gain is 0.12 nats at 512 to 1,023 tokens, 0.02 at 1,024 to 2,047, and none beyond.

    tra sweep text_far --out runs/text_far --records results/text_far/records.jsonl
    tra report runs/text_far --experiment text_far
    python -m traformer.experiments.summary text_far runs/text_far results/text_far docs/evidence_text.md
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from traformer.experiments.protocol import FAILS, HOLDS, UNDECIDED, Arm, Protocol, Setting, Verdict
from traformer.experiments.recall_in_text import FAR, TEMPERATURE
from traformer.experiments.recall_in_text import MAIN as NEAR_FAR
from traformer.experiments.summary import csv_text, write_verdicts
from traformer.experiments.text_reach import LONGEST, STRIDE, TEXT, WINDOW, difference
from traformer.storage import write_atomically
from traformer.types import JsonObject

TITLE = "Text: what teaches a model to use context beyond its window"

RATE = 3e-3  # of near_far in text_reach
LONG_WINDOW = 2048
SHORT, LONG = "text", "long"  # settings


def _upper(name: str, **changes: JsonObject | float | str) -> Arm:
    """`near_far` with other options of its upper layer."""
    return Arm(name, NEAR_FAR.attention, {"tra_straight_through": {**FAR, **changes}})


NO_DISTANCE = Arm(
    "no_distance", NEAR_FAR.attention, {"tra_straight_through": {"distance": "none", **TEMPERATURE}}
)  # no gates, so no bias of theirs
SHARPENING = _upper("sharpening", sharpening=0.0)
GROWING = _upper("growing", threshold_growth=0.25)

_LONG_TEXT = TEXT.replace(
    task_options={**TEXT.task_options, "length": LONG_WINDOW}, batch_size=TEXT.batch_size * WINDOW // LONG_WINDOW
)
PROTOCOL = Protocol(
    settings={
        SHORT: Setting(SHORT, TEXT, str(LONGEST), "perplexity", STRIDE, RATE),
        LONG: Setting(LONG, _LONG_TEXT, str(LONGEST), "perplexity", LONG_WINDOW // 8, RATE),
    },
    waves=(
        (SHORT, (NEAR_FAR,)),
        (LONG, (NEAR_FAR,)),
        (SHORT, (NO_DISTANCE,)),
        (SHORT, (SHARPENING,)),
        (SHORT, (GROWING,)),
    ),
    hypotheses=(),  # of gains, below
    seeds=(80, 81, 82, 83, 84),
    examples=32,
)
cells, next_cells = PROTOCOL.cells, PROTOCOL.next_cells

Key = tuple[str, str]  # setting and arm
Range = tuple[int, int]  # distances of a recurrence, both ends included
ALL: Range = (0, 0)  # every token, recurring or not
WINDOWS = {SHORT: WINDOW, LONG: LONG_WINDOW}


def just_beyond(setting: str) -> Range:
    """One to four trained windows back."""
    return WINDOWS[setting], 4 * WINDOWS[setting] - 1


def far_beyond(setting: str) -> Range:
    """From four trained windows to the longest window that is read."""
    return 4 * WINDOWS[setting], LONGEST - 1


BySeed = dict[int, float]  # nats per token that the long window gains
Gains = dict[tuple[Key, Range], BySeed]


@dataclass(frozen=True)
class Gain:
    """An arm gains by the long window at these distances: over its own sliding windows, or more than another arm."""

    name: str
    claim: str
    arm: Key
    distances: Range
    more_than: Key | None = None

    def judge(self, gains: Gains, seeds: int) -> Verdict:
        own = gains.get((self.arm, self.distances), {})
        other = None if self.more_than is None else gains.get((self.more_than, self.distances), {})
        missing = [
            f"{'/'.join(key)} ({len(found)} of {seeds} seeds)"
            for key, found in ((self.arm, own), (self.more_than or self.arm, own if other is None else other))
            if len(found) < seeds
        ]
        if missing:
            return Verdict(self.name, self.claim, UNDECIDED, "not measured yet: " + ", ".join(dict.fromkeys(missing)))
        return Verdict(self.name, self.claim, *judge_gain(own, other, paired=False, digits=3))


def judge_gain(own: BySeed, other: BySeed | None, paired: bool, digits: int) -> tuple[str, str]:
    """Outcome and numbers of: a gain is above another, or, where there is no other, above 0. The seeds are complete."""

    def text(gain: float) -> str:
        return f"{gain:+.{digits}f}"

    low, high = difference(own, dict.fromkeys(own, 0.0) if other is None else other, paired or other is None)
    outcome = HOLDS if low > 0 else FAILS if high <= 0 else UNDECIDED
    mean, *theirs = (text(sum(each.values()) / len(each)) for each in (own, other) if each is not None)
    return outcome, f"{' less '.join([mean, *theirs])} nats ({text(low)} to {text(high)})"


def _hypotheses() -> tuple[Gain, ...]:
    main, long = (SHORT, NEAR_FAR.name), (LONG, NEAR_FAR.name)
    found = [
        Gain("F1", "near_far copies from 512 to 2,047 tokens back", main, just_beyond(SHORT)),
        Gain("F2", "near_far copies from 2,048 to 16,383 tokens back", main, far_beyond(SHORT)),
    ]
    causes = {NO_DISTANCE.name: "without gates", SHARPENING.name: "with sharpened scores",
              GROWING.name: "with a growing threshold"}  # fmt: skip
    for number, (name, what) in enumerate(causes.items(), 3):
        found.append(Gain(f"F{number}", f"{what} it gains more from 2,048 to 16,383 tokens back", (SHORT, name),
                          far_beyond(SHORT), main))  # fmt: skip
    return (
        *found,
        Gain("F6", "trained at 2,048 it copies from 2,048 to 8,191 tokens back", long, just_beyond(LONG)),
        Gain("F7", "and from 8,192 to 16,383 tokens back", long, far_beyond(LONG)),
        *(
            Gain(f"F{number}", f"{name}: over all tokens windows of 16,384 gain over sliding windows of 512",
                 (SHORT, name), ALL)
            for number, name in enumerate(causes, 8)
        ),
    )  # fmt: skip


HYPOTHESES = _hypotheses()
# What the table shows: doubling distances from half of the trained window on.
SHOWN: tuple[Range, ...] = tuple((1 << bits, (2 << bits) - 1) for bits in range(8, 14))


def _bins(out: Path) -> Iterator[tuple[Key, int, bool, Range, float, int]]:
    """(setting and arm, seed, whether in long windows, distances, loss, tokens) of every measured range."""
    for setting, arm, seed, one in PROTOCOL.measured(out):
        if one.value is None or one.metric not in ("loss_by_recurrence", "loss_by_place"):
            continue
        reading = one.split, one.size
        far = reading == ("validation", LONGEST)
        if not far and reading != (f"validation stride {PROTOCOL.settings[setting].stride}", WINDOWS[setting]):
            continue
        key, distances = (setting, arm.name), ALL
        if one.metric == "loss_by_recurrence":
            distances = int(one.at["distance"]), int(one.at["to"])
        yield key, seed, far, distances, one.value, one.counted


def gains(out: Path) -> Gains:
    """Of every arm with both readings: the mean loss in sliding windows less that in long ones, by range and seed."""
    sums: dict[tuple[Key, int, bool, Range], list[tuple[float, int]]] = {}
    for key, seed, far, distances, loss, tokens in _bins(out):
        wanted = [ALL] if distances == ALL else [
            one for one in (just_beyond(key[0]), far_beyond(key[0]), *SHOWN)
            if one[0] <= distances[0] and distances[1] <= one[1]
        ]  # fmt: skip
        for each in dict.fromkeys(wanted):
            sums.setdefault((key, seed, far, each), []).append((loss, tokens))
    found: Gains = {}
    for (key, seed, far, distances), parts in sums.items():
        sliding = sums.get((key, seed, False, distances))
        if far and sliding:
            found.setdefault((key, distances), {})[seed] = _mean(sliding) - _mean(parts)
    return found


def _mean(parts: list[tuple[float, int]]) -> float:
    return sum(loss * tokens for loss, tokens in parts) / sum(tokens for _, tokens in parts)


def verdicts(out: str | Path) -> list[Verdict]:
    found = gains(Path(out))
    return [hypothesis.judge(found, len(PROTOCOL.seeds)) for hypothesis in HYPOTHESES]


def write_summary(out: Path, folder: Path) -> None:
    """gains.csv, table.md and the verdicts."""
    folder.mkdir(parents=True, exist_ok=True)
    found = gains(out)
    rows = [("setting", "arm", "distance", "to", "seed", "gain")]
    for (key, distances), by_seed in found.items():
        low, high = map(str, distances)
        rows += [(*key, low, high, str(seed), f"{gain:.6f}") for seed, gain in sorted(by_seed.items())]
    write_atomically(folder / "gains.csv", csv_text(rows))
    write_atomically(folder / "table.md", table(found))
    write_verdicts(verdicts(out), folder)


def table(found: Gains) -> str:
    """A line for each arm: its mean gain (lowest to highest seed) at doubling distances and over all tokens."""
    if not found:
        return "Nothing has been measured yet.\n"
    heads = [f"{low:,}–{high:,}" for low, high in SHOWN]
    lines = [f"| gain in nats, tokens back | {' | '.join([*heads, 'all tokens'])} | seeds |"]
    lines.append("|---" * (len(heads) + 3) + "|")
    for setting, arm in dict.fromkeys(key for key, _ in found):
        each = [found.get(((setting, arm), distances), {}) for distances in (*SHOWN, ALL)]
        name = f"`{arm}`" + (f", trained at {LONG_WINDOW:,}" if setting == LONG else "")
        lines.append(f"| {name} | {' | '.join(map(gain_text, each))} | {max(map(len, each))} |")
    return "\n".join(lines) + "\n"


def gain_text(gains: BySeed) -> str:
    """The mean, and the lowest and the highest seed; nothing where nothing was measured."""
    if not gains:
        return ""
    low, high = min(gains.values()), max(gains.values())
    return f"{sum(gains.values()) / len(gains):+.3f} ({low:+.3f} to {high:+.3f})"
