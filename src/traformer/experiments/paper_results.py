"""What the runs of one of the paper's tables say: means over seeds beside chance, and verdicts on the claims."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from traformer.experiments.claims import (
    NOT_TESTED,
    TARGETS,
    error_cut_by_sixty_percent,
    error_of_paper_peers_cut,
    error_per_read,
    every_seed,
    more_than_three_times_longer,
)
from traformer.experiments.paper import JUDGED, Part
from traformer.experiments.protocol import FAILS, HOLDS, Verdict
from traformer.runs.folder import RunFolder
from traformer.runs.measurements import Measurement, largest_length

READ_METRIC = "error_per_read"  # of flip-flop


@dataclass(frozen=True)
class Summary:
    """One part at one split: method -> length label -> the rows of its seeds, in the order of the lengths."""

    part: str
    split: str
    metric: str
    trained: int
    rows: dict[str, dict[str, list[Measurement]]]
    reads: dict[str, dict[int, tuple[int, int]]]  # of flip-flop: method -> length -> wrong and all, of all seeds

    @property
    def title(self) -> str:
        split = "" if self.split in ("test", "validation") else f", {self.split.removeprefix('test/')}"
        return f"{self.part}{split}: {self.metric.replace('_', ' ')}"

    @property
    def lengths(self) -> list[str]:
        found = {label for by_length in self.rows.values() for label in by_length}
        return sorted(found, key=largest_length)

    def chance(self, length: str) -> float | None:
        return next((rows[length][0].chance for rows in self.rows.values() if length in rows), None)

    def means(self, method: str) -> dict[int, float]:
        """Upper end of the length -> mean over seeds."""
        return {largest_length(label): _mean(rows) for label, rows in self.rows[method].items()}

    def worst(self, method: str) -> dict[int, float]:
        """Upper end of the length -> the worst seed."""
        return {
            largest_length(label): min(row.value or 0.0 for row in rows) for label, rows in self.rows[method].items()
        }

    def text(self, method: str, length: str) -> str:
        """Mean (worst to best), or nothing."""
        rows = self.rows[method].get(length)
        if not rows:
            return ""
        values = [row.value or 0.0 for row in rows]
        if self.metric == "bits_per_byte":
            return f"{_mean(rows):.3f}" + (f" ({min(values):.3f}–{max(values):.3f})" if len(values) > 1 else "")
        mean, low, high = (f"{100 * value:.0f}" for value in (_mean(rows), min(values), max(values)))
        return f"{mean} %" if low == high else f"{mean} % ({low}–{high})"

    def seeds(self, method: str) -> int:
        return max(len(rows) for rows in self.rows[method].values())


def summaries(part: Part, out: str | Path, seeds: int | None = None) -> list[Summary]:
    """Everything that was measured of a part, a summary for each split; runs that are not finished are left out."""
    metric = "bits_per_byte" if part.config.task == "text" else "exact_match"
    found: dict[str, Summary] = {}
    for cell in part.cells(seeds):
        folder = RunFolder(Path(out) / cell.name)
        for one in folder.results.read() if folder.is_run() else []:
            if (one.study, one.examples, one.step) != ("eval", part.examples, part.config.steps):
                continue
            if one.metric not in (metric, READ_METRIC):
                continue
            split = found.setdefault(one.split, Summary(part.name, one.split, metric, one.train_length, {}, {}))
            if one.metric == metric:
                split.rows.setdefault(cell.config.attention, {}).setdefault(str(one.length), []).append(one)
            else:
                at = split.reads.setdefault(cell.config.attention, {})
                wrong, total = at.get(int(one.length), (0, 0))
                counted = one.counted or 0
                at[int(one.length)] = (wrong + round((one.value or 0.0) * counted), total + counted)
    return list(found.values())


def verdicts(summary: Summary, scale: str) -> list[Verdict]:
    """On the claims about length, for each method of ours that was measured; smoke tests nothing."""
    found = []
    for method in JUDGED:
        if method not in summary.rows or "/" in summary.split:
            continue
        name = f"{summary.part}{'' if summary.split in ('test', 'validation') else ' ' + summary.split}"
        own = summary.means(method)
        if summary.metric == "bits_per_byte":
            found.append(_stable(name, method, own, summary.trained))
            continue
        others = {
            other: summary.means(other)
            for other in summary.rows
            if not (other.startswith("tra") or other in JUDGED)  # ablations of TRA are no rivals either
        }
        found.append(more_than_three_times_longer(name, method, own, summary.trained))
        found.append(error_cut_by_sixty_percent(name, method, own, others, summary.trained))
        against_paper = error_of_paper_peers_cut(name, method, own, others, summary.trained)
        found += [against_paper] if against_paper else []
        target = TARGETS.get(summary.part)
        if target is not None and method in target.methods:
            found.append(every_seed(name, method, summary.worst(method), target))
        if method in summary.reads:
            found.append(error_per_read(name, method, summary.reads[method]))
    if scale == "smoke":
        return [Verdict(**{**asdict(verdict), "outcome": NOT_TESTED}) for verdict in found]
    return found


def _stable(name: str, method: str, bits: dict[int, float], trained: int) -> Verdict:
    claim = f"{method}'s bits per byte do not rise beyond the trained window"
    longer = {window: value for window, value in bits.items() if window > trained}
    if trained not in bits or not longer:
        return Verdict(name, claim, NOT_TESTED, "no longer window was read")
    worst = max(longer, key=lambda window: longer[window])
    numbers = f"{bits[trained]:.3f} at {trained}, at most {longer[worst]:.3f} (at {worst})"
    return Verdict(name, claim, HOLDS if longer[worst] <= bits[trained] else FAILS, numbers)


def _mean(rows: list[Measurement]) -> float:
    return sum(row.value or 0.0 for row in rows) / len(rows)
