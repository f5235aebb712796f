"""report.html, report.md and report.csv of a set of runs: plots, tables, every row, and the commands that make it."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from html import escape
from pathlib import Path

from traformer import __version__
from traformer.reports import perplexity
from traformer.reports.collect import Panel, Run, display_split, display_task, panels, series_labels
from traformer.reports.many import drawn, html_many, is_many, markdown_many, share_cell
from traformer.reports.plot import accuracy_plot, legend
from traformer.reports.style import STYLE
from traformer.reports.table import by_length, point_text, series_names
from traformer.storage import write_atomically


def write_report(runs: Sequence[Run], out: str | Path, title: str | None = None) -> Path:
    """Write all three into `out`; returns the page."""
    out = Path(out)
    title = title or default_title(runs)
    write_atomically(out / "report.md", markdown(runs, title))
    write_atomically(out / "report.csv", csv_rows(runs))
    page = out / "report.html"
    write_atomically(page, html(runs, title))
    return page


def default_title(runs: Sequence[Run]) -> str:
    is_text = [run.config.task == "text" for run in runs]
    return "Perplexity by window" if all(is_text) else "Accuracy by length"


CSV_COLUMNS = (
    "task", "attention", "seed", "train_length", "split", "length", "metric", "value", "low", "high", "examples",
)  # fmt: skip


def csv_rows(runs: Sequence[Run]) -> str:
    """Every measured number, one a line."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["run", "lr", *CSV_COLUMNS])
    for run in runs:
        for row in run.rows:
            writer.writerow([run.name, run.config.lr, *(row.get(name) for name in CSV_COLUMNS)])
    return text.getvalue()


def groups(runs: Sequence[Run]) -> dict[tuple[str, int], list[Panel]]:
    """Panels by task and training length."""
    found: dict[tuple[str, int], list[Panel]] = {}
    for panel in panels(runs):
        found.setdefault((panel.task, panel.train_length), []).append(panel)
    return found


def unit_of(task: str) -> str:
    from traformer.tasks import TASKS

    return TASKS[task].length_unit if task in TASKS else "tokens"


def findings(runs: Sequence[Run]) -> list[str]:
    """One sentence a task: how each method does at the longest length. Numbers only; the reader judges."""
    sentences = []
    for (task, train_length), members in groups(runs).items():
        longest = max(point.size for panel in members for series in panel.series for point in series.points)
        parts = []
        for label in series_names([drawn(panel) for panel in members]):
            values = [
                f"{100 * point.value:.0f} %" + (f" {display_split(panel.split)}" if len(members) > 1 else "")
                for panel in members
                for series in panel.series
                for point in series.points
                if series.label == label and point.size == longest
            ]
            if values:
                parts.append(f"{label} {', '.join(values)}")
        sentences.append(
            f"{display_task(task)}, trained to {train_length} {unit_of(task)}, exact match at {longest:,}"
            f" ({longest / train_length:.3g}x): {'; '.join(parts)}."
        )
    return [*sentences, *perplexity.findings(runs)]


NOTE = (
    "Exact match: every answer token of a sequence is right. Intervals are 95 % (Wilson) over the sequences of one run,"
    " or from the worst to the best seed where there are several."
)


def html(runs: Sequence[Run], title: str) -> str:
    all_groups = groups(runs)
    all_panels = [p for ps in all_groups.values() for p in ps] + [p for _, p in perplexity.text_panels(runs)]
    styles = {label: index for index, label in enumerate(series_names([drawn(panel) for panel in all_panels]))}
    body = [
        f"<h1>{escape(title)}</h1>",
        '<ul class="findings">' + "".join(f"<li>{escape(sentence)}</li>" for sentence in findings(runs)) + "</ul>",
        legend(styles),
    ]
    for (task, train_length), members in all_groups.items():
        unit = unit_of(task)
        body.append(f"<section><h2>{escape(display_task(task))}</h2>")
        body.append(
            f'<p class="sub">Trained on at most {train_length:,} {escape(unit)} (the vertical line).'
            " The shaded lengths were never trained on.</p>"
        )
        plots = "".join(accuracy_plot(drawn(panel), styles, unit) for panel in members)
        body.append(f'<div class="plots">{plots}</div>')
        body += [html_many(panel) for panel in members] if is_many(members) else [html_table(members)]
        body.append("</section>")
    body.append(perplexity.html_section(runs, styles))
    body.append(f'<p class="sub">{escape(NOTE)}</p>')
    body.append(commands_section(runs))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><main>\n"
        + "\n".join(body)
        + "\n</main></body></html>\n"
    )


def html_table(members: Sequence[Panel]) -> str:
    labels = series_names(members)
    head = "".join(f"<th>{escape(text)}</th>" for text in ("split", "length", "x trained", *labels))
    rows = []
    for panel in members:
        for length, found in by_length(panel).items():
            factor = next(iter(found.values())).size / panel.train_length
            cells = [share_cell(found.get(label)) for label in labels]
            split = escape(display_split(panel.split) or "test")
            beyond = ' class="beyond-row"' if factor > 1 else ""
            rows.append(f"<tr{beyond}><td>{split}</td><td>{length}</td><td>{factor:.3g}</td>{''.join(cells)}</tr>")
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def commands_section(runs: Sequence[Run]) -> str:
    parts = ["<section><h2>How to repeat each number</h2>"]
    for label, run, seeds in first_seeds(runs):
        last = run.metrics[-1] if run.metrics else {}
        facts = [seeds, f"{run.rows[0]['step']:,} steps"]
        if last:
            facts += [f"final loss {last['loss']:.4f}", f"{last['tokens']:,} tokens trained on"]
        seen = [row["seen_in_training"] for row in run.rows if row.get("seen_in_training")]
        if seen:
            facts.append(f"up to {100 * max(seen):.1f} % of the test sequences of a length also occur in training")
        heading = f"{display_task(run.config.task)}, {label}"
        commands = "\n".join(run.commands())
        parts.append(
            f'<h3>{escape(heading)}</h3><p class="sub">{escape(", ".join(facts))}</p><pre>{escape(commands)}</pre>'
        )
    parts.append(f'<p class="sub">{escape(versions_text(runs))}</p></section>')
    return "".join(parts)


def first_seeds(runs: Sequence[Run]) -> list[tuple[str, Run, str]]:
    """Label, the run of the first seed, and the seeds in words: runs that differ in the seed alone are one entry."""
    labels = series_labels(runs)
    found: dict[tuple[str, int, str], list[Run]] = {}
    for run in runs:
        found.setdefault((run.config.task, run.train_length, labels[run.path]), []).append(run)
    entries = []
    for (_, _, label), same in found.items():
        first, *others = sorted(same, key=lambda run: run.config.seed)
        seeds = f"seed {first.config.seed}"
        if others:
            seeds += " (likewise with " + ", ".join(f"--seed {run.config.seed}" for run in others) + ")"
        entries.append((label, first, seeds))
    return entries


def versions_text(runs: Sequence[Run]) -> str:
    kinds = dict.fromkeys(", ".join(f"{k} {v}" for k, v in run.records["versions"].items()) for run in runs)
    machines = dict.fromkeys(", ".join(f"{k} {v}" for k, v in run.records["environment"].items()) for run in runs)
    return f"Made with {' / '.join(kinds)} on {' / '.join(machines)}; page by traformer {__version__}."


def markdown(runs: Sequence[Run], title: str) -> str:
    lines = [f"# {_md(title)}", ""]
    lines += [f"- {_md(sentence)}" for sentence in findings(runs)]
    for (task, train_length), members in groups(runs).items():
        labels = series_names(members)
        lines += [
            "",
            f"## {_md(display_task(task))}",
            "",
            f"Trained to {train_length} {unit_of(task)}. {sample_text(members)}",
        ]
        if is_many(members):
            for panel in members:
                lines += markdown_many(panel, _md)
            continue
        lines.append("")
        lines.append("| split | length | x trained | " + " | ".join(map(_md, labels)) + " |")
        lines.append("|---|---|---|" + "---|" * len(labels))
        for panel in members:
            for length, found in by_length(panel).items():
                factor = next(iter(found.values())).size / panel.train_length
                cells = " | ".join(point_text(found.get(label)) for label in labels)
                lines.append(f"| {_md(display_split(panel.split) or 'test')} | {length} | {factor:.3g} | {cells} |")
    lines += perplexity.markdown_lines(runs)
    lines += ["", _md(NOTE), "", "## How to repeat each number", ""]
    for label, run, seeds in first_seeds(runs):
        lines += [f"{_md(display_task(run.config.task))}, {_md(label)}, {seeds}:", ""]
        lines += ["```sh", *run.commands(), "```", ""]
    lines.append(_md(versions_text(runs)))
    return "\n".join(lines) + "\n"


def sample_text(members: Sequence[Panel]) -> str:
    """What a cell of these tables says, and of how many sequences."""
    points = [point for panel in members for series in panel.series for point in series.points]
    examples, seeds = ({getattr(point, name) for point in points} for name in ("examples", "seeds"))
    most = max(seeds)
    what = "Exact match (95 % interval)" if most == 1 else f"Exact match, mean of up to {most} seeds (worst–best)"
    return f"{what}; {'/'.join(map(str, sorted(examples)))} sequences a length and run."


def _md(text: str) -> str:
    """Text that Markdown shows as it is."""
    for character in "\\`*_[]<>|#":
        text = text.replace(character, "\\" + character)
    return text
