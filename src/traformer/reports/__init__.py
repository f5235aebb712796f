"""Tables, plots and pages of what was measured. In Python: `from traformer.reports import report`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from traformer.reports.inline import Page


def report(*folders: str | Path, title: str | None = None) -> Page:
    """The page of `tra report` for run folders, or folders that hold some: a notebook's cell shows it.

    Nothing is written; the page's `save(path)` does, and `tra report` also writes its tables and figures as files.
    """
    from traformer.reports.collect import collect
    from traformer.reports.figures import figures
    from traformer.reports.inline import Page
    from traformer.reports.page import html
    from traformer.reports.write import default_title

    runs = collect(folders)
    drawn = figures(runs)
    title = title or default_title(drawn)
    return Page(title, html(runs, drawn, title, files={}))
