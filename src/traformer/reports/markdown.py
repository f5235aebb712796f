"""report.md: the findings, tables and commands of a report, and its figures where they were written as files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from traformer.experiments.protocol import Verdict
from traformer.reports.collect import Run, display_task, unit_of
from traformer.reports.figures import Figure
from traformer.reports.page import NOTE, first_seeds, guess_text, heading, protocols, versions_text
from traformer.reports.tables import findings, groups, markdown_table, sample_text, tables

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|#~&$!])")


def quote(text: str) -> str:
    """Text that Markdown shows as it is: no markup, link, image, entity or HTML, and always one line."""
    text = " ".join(text.split())
    text = _SPECIAL.sub(r"\\\1", text)
    text = re.sub(r"(?i)(https?|ftp|mailto|javascript)(:)", r"\1\\\2", text)  # addresses would become links
    text = re.sub(r"(?i)\b(www)(\.)", r"\1\\\2", text)
    text = re.sub(r"^(\d+)([.)])(?=\s|$)", r"\1\\\2", text)  # a list's number
    return re.sub(r"^([-+=])", r"\\\1", text)


def code_block(lines: Sequence[str]) -> list[str]:
    """A fenced block that no line inside can close."""
    longest = max((len(run) for line in lines for run in re.findall(r"`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}sh", *lines, fence, ""]


def markdown(
    runs: Sequence[Run],
    figures: Sequence[Figure],
    title: str,
    files: Mapping[int, str] | None = None,
    verdicts: Sequence[Verdict] = (),
) -> str:
    """The whole file. `files` are the names of the figures' files, by their place in `figures`."""
    names = {id(figure): (files or {}).get(place) for place, figure in enumerate(figures)}
    lines = [f"# {quote(title)}", "", *(f"- {quote(sentence)}" for sentence in findings(figures))]
    if verdicts:
        lines += ["", "## Hypotheses", "", "| hypothesis | statement | outcome | numbers |", "|---|---|---|---|"]
        for one in verdicts:
            cells = (one.name, one.claim, one.outcome, one.numbers)
            lines.append("| " + " | ".join(map(quote, cells)) + " |")
    for (section, task, train_length), by_metric in groups(figures).items():
        lines += ["", f"## {quote(heading(section, task))}", ""]
        if section != "training":
            guess = quote(guess_text(section, task))  # which drops the space before it
            lines += [f"Trained to {train_length:,} {unit_of(task)}. {guess}".rstrip(), ""]
        for members in by_metric.values():
            shown = [names[id(figure)] for figure in members if figure.headline and names[id(figure)]]
            lines += [f"![{quote(figure_title)}](figures/{name}.png)" for figure_title, name in _images(members, names)]
            lines += [""] if shown else []
            for table in tables(members):
                lines += [f"{quote(table.caption[0].upper() + table.caption[1:])}. {quote(sample_text(members))}", ""]
                lines += [*markdown_table(table, quote), ""]
        if section == "text":
            lines += [quote(note) for note in protocols(runs)]
    lines += ["", quote(NOTE), "", "## How to repeat each number", ""]
    for label, run, seeds in first_seeds(runs):
        lines += [f"{quote(display_task(run.config.task))}, {quote(label)}, {quote(seeds)}:", ""]
        lines += code_block(run.commands())
    lines.append(quote(versions_text(runs)))
    return "\n".join(lines) + "\n"


def _images(figures: Sequence[Figure], names: Mapping[int, str | None]) -> list[tuple[str, str]]:
    """Title and file name of the headline figures that are files."""
    found = []
    for figure in figures:
        name = names[id(figure)]
        if figure.headline and name:
            found.append((figure.title, name))
    return found
