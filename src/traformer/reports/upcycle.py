"""What `tra reproduce upcycle` found: tables, verdicts, a heat map of recall, and the measurements as files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from traformer.experiments.protocol import Verdict
from traformer.experiments.upcycle import ARMS, Plan
from traformer.reports.style import LIGHT_THEME
from traformer.runs.measurements import Measurement, write_rows
from traformer.storage import write_atomically

Found = Mapping[str, Sequence[Measurement]]  # arm -> measurements


def perplexities(found: Found) -> dict[tuple[str, int], float]:
    return {
        (arm, one.size): one.value
        for arm, rows in found.items()
        for one in rows
        if one.metric == "perplexity" and one.value is not None
    }


def recalls(found: Found) -> dict[tuple[str, int], float]:
    """(arm, length) -> share of all planted facts that were recalled."""
    shares = {}
    for arm, rows in found.items():
        for length in {one.size for one in rows if one.metric == "recall_at_depth"}:
            here = [one for one in rows if one.metric == "recall_at_depth" and one.size == length]
            right = sum((one.value or 0.0) * one.counted for one in here)
            shares[arm, length] = right / sum(one.counted for one in here)
    return shares


def write_upcycle(
    found: Found, tuning: Sequence[Measurement], verdicts: Sequence[Verdict], plan: Plan, out: Path
) -> list[Path]:
    """results.json, tuning.csv, table.md, targets.json, and recall.png where recall was measured."""
    write_rows(out / "results.json", [{"arm": arm, **one.to_row()} for arm, rows in found.items() for one in rows])
    lines = [f"{one.split},{one.step},{one.at['tuning_tokens']},{one.value:.4f}" for one in tuning]
    write_atomically(out / "tuning.csv", "\n".join(["stage,step,tuning_tokens,perplexity", *lines]) + "\n")
    write_atomically(out / "table.md", markdown(found, tuning, verdicts, plan))
    write_atomically(out / "targets.json", json.dumps([asdict(one) for one in verdicts], indent=1) + "\n")
    files = [out / name for name in ("results.json", "tuning.csv", "table.md", "targets.json")]
    if recalls(found):
        draw_recall(found, out / "recall.png")
        files.append(out / "recall.png")
    return files


def markdown(found: Found, tuning: Sequence[Measurement], verdicts: Sequence[Verdict], plan: Plan) -> str:
    ppl, shares = perplexities(found), recalls(found)
    parts = [f"Perplexity of {plan.tokens:,} tokens of validation text, by window\n", _table(ppl, "{:.2f}", "window")]
    places = [
        (arm, one) for arm, rows in found.items() for one in rows
        if one.metric == "loss_by_place" and one.size == plan.longest and int(one.at["place"]) >= min(plan.windows) // 4
    ]  # fmt: skip
    if places:
        by_place = {(arm, int(one.at["to"]) + 1): one.value for arm, one in places if one.value is not None}
        title = f"Loss in nats by place in a window of {plan.longest:,} (the column's number is where the part ends)\n"
        parts += [title, _table(by_place, "{:.2f}", "places to")]
    if shares:
        title = f"Share of planted facts recalled, {plan.texts} texts of {plan.facts} facts at each length\n"
        parts += [title, _table({key: 100 * value for key, value in shares.items()}, "{:.0f} %", "tokens read")]
    for metric, label in (("prefill_speed", "reading"), ("decode_speed", "writing")):
        speeds = {
            (arm, one.size): one.value
            for arm, rows in found.items() for one in rows
            if one.metric == metric and one.value is not None
        }  # fmt: skip
        if speeds:
            parts += [f"Tokens per second of processor time, {label}\n", _table(speeds, "{:.1f}", "tokens before")]
    if tuning:
        counts = f"{tuning[0].counted:,} tokens of validation text at window {tuning[0].size:,}"
        head = f"Perplexity of {counts}, by tokens of tuning\n"
        rows = [
            f"| {ARMS[one.split]} | {one.step:,} | {int(one.at['tuning_tokens']):,} | {one.value:.2f} |"
            for one in tuning
        ]
        parts += [head, "\n".join(["| stage | step | tokens | perplexity |", "|---|---:|---:|---:|", *rows]) + "\n"]
    claims = [f"- **{one.outcome}**: {one.claim} ({one.numbers})" for one in verdicts]
    return "\n".join([*parts, "Targets\n", *claims]) + "\n"


def _table(values: Mapping[tuple[str, int], float], form: str, head: str) -> str:
    columns = sorted({column for _, column in values})
    lines = [f"| {head} | " + " | ".join(f"{column:,}" for column in columns) + " |", "|---|" + "---:|" * len(columns)]
    for arm, label in ARMS.items():
        if any((arm, column) in values for column in columns):
            cells = [form.format(values[arm, column]) if (arm, column) in values else "" for column in columns]
            lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def draw_recall(found: Found, file: Path) -> None:
    """A heat map for each arm: tokens read across, depth down, the share recalled as colour and number."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

    theme = LIGHT_THEME
    arms = [arm for arm in ARMS if any(one.metric == "recall_at_depth" for one in found.get(arm, ()))]
    picture = Figure(figsize=(2.6 * len(arms) + 0.6, 3.4), dpi=150, facecolor=theme["ground"], layout="constrained")
    FigureCanvasAgg(picture)
    colours = LinearSegmentedColormap.from_list("recall", [theme["wash"], theme["s0"]])
    for panel, arm in zip(picture.subplots(1, len(arms), squeeze=False, sharey=True)[0], arms, strict=True):
        rows = [one for one in found[arm] if one.metric == "recall_at_depth"]
        lengths = sorted({one.size for one in rows})
        depths = sorted({float(one.at["depth"]) for one in rows})
        share = [[_mean(rows, length, depth) for length in lengths] for depth in depths]
        panel.imshow(share, cmap=colours, vmin=0, vmax=1, aspect="auto")
        for row, values in enumerate(share):
            for column, value in enumerate(values):
                ink = theme["ground"] if value > 0.6 else theme["ink"]
                panel.text(column, row, f"{100 * value:.0f} %", ha="center", va="center", color=ink, fontsize=8)
        panel.set_title(ARMS[arm].replace(", ", ",\n"), fontsize=9, color=theme["ink"])
        panel.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], fontsize=8, color=theme["soft"])
        panel.set_yticks(range(len(depths)), [f"{100 * d:.0f} %" for d in depths], fontsize=8, color=theme["soft"])
        panel.set_xlabel("tokens read", fontsize=8, color=theme["soft"])
        for spine in panel.spines.values():
            spine.set_color(theme["rule"])
    picture.axes[0].set_ylabel("depth of the fact", fontsize=8, color=theme["soft"])
    picture.savefig(file)


def _mean(rows: Sequence[Measurement], length: int, depth: float) -> float:
    here = [one for one in rows if one.size == length and float(one.at["depth"]) == depth]
    return sum((one.value or 0.0) * one.counted for one in here) / sum(one.counted for one in here)
