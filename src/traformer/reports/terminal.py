"""Methods side by side on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from traformer.experiments.protocol import Verdict
from traformer.reports.collect import Run
from traformer.reports.figures import figures
from traformer.reports.page import heading
from traformer.reports.tables import groups, rich_table, tables
from traformer.terminal import new_table


def comparison_table(runs: Sequence[Run]) -> list[Table]:
    """The headline metrics of every task: methods as columns, or as rows where they are many."""
    shown = []
    for (section, task, train_length), by_metric in groups(figures(runs)).items():
        for members in by_metric.values():
            if members[0].headline:
                for table in tables(members):
                    title = f"{heading(section, task)}, trained to {train_length}: {table.caption}"
                    shown.append(rich_table(table, f"{title} (95 % interval, or worst to best seed)"))
    return shown


def verdict_tables(verdicts: Sequence[Verdict]) -> list[Table]:
    """The hypotheses of an experiment and what the runs say, if it has any."""
    from rich.markup import escape

    if not verdicts:
        return []
    table = new_table("Hypotheses", left=("hypothesis", "claim", "outcome", "numbers"))
    for one in verdicts:
        table.add_row(*map(escape, (one.name, one.claim, one.outcome, one.numbers)))
    return [table]
