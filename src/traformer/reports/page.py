"""report.html: one page that opens from disk and needs nothing but itself; its figures are also files beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from traformer import __version__
from traformer.evaluation.protocols import protocol_text
from traformer.experiments.protocol import Verdict
from traformer.reports.collect import Run, display_task, series_labels, unit_of
from traformer.reports.figures import Figure, labels_of
from traformer.reports.style import PAGE_STYLE
from traformer.reports.svg import figure_svg, legend
from traformer.reports.tables import findings, groups, html_table, tables
from traformer.runs.metrics import SECTIONS
from traformer.tasks import TASKS

NOTE = (
    "Intervals are 95 % over the sequences of one run (Wilson's for shares, blocks of text for losses), or from the"
    " worst to the best seed where there are several. The dotted line is chance: the guess named with each task."
)


def html(
    runs: Sequence[Run],
    figures: Sequence[Figure],
    title: str,
    files: Mapping[int, str],
    verdicts: Sequence[Verdict] = (),
) -> str:
    """The page. `files` are the names of the figures' files, by their place in `figures`."""
    styles = page_styles(figures)
    names = {id(figure): files[place] for place, figure in enumerate(figures) if place in files}
    body = [
        f"<h1>{escape(title)}</h1>",
        '<ul class="findings">' + "".join(f"<li>{escape(sentence)}</li>" for sentence in findings(figures)) + "</ul>",
        verdicts_section(verdicts),
        legend({label: styles[label] for label in labels_of([figure for figure in figures if not figure.is_many])}),
    ]
    for (section, task, train_length), by_metric in groups(figures).items():
        body.append(_section(runs, section, task, train_length, by_metric, styles, names))
    body += [f'<p class="sub">{escape(NOTE)}</p>', commands_section(runs)]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{PAGE_STYLE}</style></head>\n<body><main>\n"
        + "\n".join(filter(None, body))
        + "\n</main></body></html>\n"
    )


def page_styles(figures: Sequence[Figure]) -> dict[str, int]:
    """A number per method: those that share a plot come first, so that the clearest styles are theirs."""
    labels = [*labels_of([figure for figure in figures if not figure.is_many]), *labels_of(figures)]
    return {label: number for number, label in enumerate(dict.fromkeys(labels))}


def _section(
    runs: Sequence[Run],
    section: str,
    task: str,
    train_length: int,
    by_metric: Mapping[str, Sequence[Figure]],
    styles: Mapping[str, int],
    files: Mapping[int, str],
) -> str:
    """The headline metrics of a task as plots and tables, the others in a part that opens."""
    unit = escape(unit_of(task))
    parts = [f"<section><h2>{escape(heading(section, task))}</h2>"]
    if section != "training":
        parts.append(
            f'<p class="sub">Trained on at most {train_length:,} {unit} (the vertical line). The shaded part was never'
            f" trained on.{escape(guess_text(section, task))}</p>"
        )
    parts += [f'<p class="sub">{escape(note)}</p>' for note in (protocols(runs) if section == "text" else ())]
    shown = [figures for figures in by_metric.values() if figures[0].headline]
    more = [figures for figures in by_metric.values() if not figures[0].headline]
    parts.append(_figures(shown, styles, files))
    if more:
        names = ", ".join(figures[0].metric.label for figures in more)
        parts.append(f"<details><summary>More: {escape(names)}</summary>{_figures(more, styles, files)}</details>")
    return "".join([*parts, "</section>"])


def _figures(metrics: Sequence[Sequence[Figure]], styles: Mapping[str, int], files: Mapping[int, str]) -> str:
    parts = ['<div class="plots">']
    for figures in metrics:
        parts += [_figure(figure, styles, files.get(id(figure))) for figure in figures]
    parts.append("</div>")
    for figures in metrics:
        parts += [html_table(table) for table in tables(figures)]
    return "".join(parts)


def _figure(figure: Figure, styles: Mapping[str, int], file: str | None) -> str:
    wide = ' class="wide"' if figure.is_many else ""
    links = ""
    if file is not None:
        anchors = "".join(
            f'<a href="figures/{escape(file)}.{suffix}" download'
            f' aria-label="{escape(figure.title)} as {suffix.upper()}">{suffix.upper()}</a>'
            for suffix in ("png", "svg", "csv")
        )
        links = f'<span class="downloads">{anchors}</span>'
    caption = f"<figcaption><span>{escape(figure.metric.summary)}</span>{links}</figcaption>"
    plot = figure_svg(figure, styles)
    if figure.is_many:  # too wide for a phone
        plot = f'<div class="scroll" role="group" tabindex="0" aria-label="{escape(figure.title)}">{plot}</div>'
    return f"<figure{wide}>{plot}{caption}</figure>"


def heading(section: str, task: str) -> str:
    """ "Flip-flop", "Flip-flop: inside the attention"."""
    name = display_task(task)
    if section in ("accuracy", "text"):
        return name
    return f"{name}: {SECTIONS[section][0].lower()}{SECTIONS[section][1:]}"


def guess_text(section: str, task: str) -> str:
    if section not in ("accuracy", "stretch") or task not in TASKS:
        return ""
    return f" Chance: {TASKS[task].guess}."


def protocols(runs: Sequence[Run]) -> list[str]:
    """How texts were measured, each way once."""
    found = [one.protocol for run in runs for one in run.of_study("eval") if "tokenizer" in one.protocol]
    return list(dict.fromkeys(map(protocol_text, found)))


def verdicts_section(verdicts: Sequence[Verdict]) -> str:
    """The hypotheses of an experiment, each with what the runs say."""
    if not verdicts:
        return ""
    rows = "".join(
        f"<tr><td>{escape(one.name)}</td><td>{escape(one.claim)}</td>"
        f'<td class="outcome {one.outcome.replace(" ", "-")}">{escape(one.outcome)}</td>'
        f"<td>{escape(one.numbers)}</td></tr>"
        for one in verdicts
    )
    names = ("hypothesis", "statement", "outcome", "numbers")
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    table = f'<table class="verdicts"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
    scroll = f'<div class="scroll" role="group" tabindex="0" aria-label="Hypotheses">{table}</div>'
    return f"<section><h2>Hypotheses</h2>{scroll}</section>"


def commands_section(runs: Sequence[Run]) -> str:
    parts = ["<section><h2>How to repeat each number</h2>"]
    for label, run, seeds in first_seeds(runs):
        title = f"{display_task(run.config.task)}, {label}"
        commands = "\n".join(run.commands())
        facts = ", ".join([seeds, *run_facts(run)])
        parts.append(f'<h3>{escape(title)}</h3><p class="sub">{escape(facts)}</p><pre>{escape(commands)}</pre>')
    parts.append(f'<p class="sub">{escape(versions_text(runs))}</p></section>')
    return "".join(parts)


def run_facts(run: Run) -> list[str]:
    facts = [f"{run.step:,} steps"]
    if run.training:
        last = run.training[-1]
        facts.append(f"final loss {last.loss:.4f}")
        facts += [f"{last.tokens:,} tokens trained on"] if last.tokens is not None else []
    seen = [one.seen_in_training for one in run.measurements if one.seen_in_training]
    if seen:
        facts.append(f"up to {100 * max(seen):.1f} % of the test sequences of a length also occur in training")
    return facts


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
    kinds = dict.fromkeys(", ".join(f"{k} {v}" for k, v in run.versions.items()) for run in runs)
    machines = dict.fromkeys(", ".join(f"{k} {v}" for k, v in run.environment.items()) for run in runs)
    return f"Made with {' / '.join(kinds)} on {' / '.join(machines)}; page by traformer {__version__}."
