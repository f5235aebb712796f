"""report.html, report.md, report.csv and the figures of a set of runs as files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from traformer.experiments.protocol import Verdict
from traformer.reports.collect import Run
from traformer.reports.csv_files import figure_csv, measurements_csv
from traformer.reports.figures import Figure, figure_folder, figures, file_names
from traformer.reports.markdown import markdown
from traformer.reports.page import html, page_styles
from traformer.reports.svg import figure_svg, standalone
from traformer.storage import write_atomically


def write_report(
    runs: Sequence[Run],
    out: str | Path,
    title: str | None = None,
    verdicts: Sequence[Verdict] = (),
    with_figures: bool = True,
) -> Path:
    """Write all of them into `out`; returns the page. `with_figures` adds each figure as PNG, SVG and CSV."""
    out = Path(out)
    drawn = figures(runs)
    title = title or default_title(drawn)
    names = file_names(drawn) if with_figures else {}
    if with_figures:
        write_figures(drawn, out, names)
    write_atomically(out / "report.md", markdown(runs, drawn, title, names, verdicts))
    write_atomically(out / "report.csv", measurements_csv(runs))
    page = out / "report.html"
    write_atomically(page, html(runs, drawn, title, names, verdicts))
    return page


def write_figures(drawn: Sequence[Figure], out: Path, names: dict[int, str]) -> None:
    """Each figure as PNG, SVG and CSV in a folder beside the page."""
    from traformer.reports.png import save_png

    folder = figure_folder(out)
    folder.mkdir(parents=True, exist_ok=True)
    styles = page_styles(drawn)
    for place, figure in enumerate(drawn):
        file = folder / names[place]
        svg = figure_svg(figure, styles)
        write_atomically(file.with_name(f"{file.name}.svg"), standalone(svg))
        write_atomically(file.with_name(f"{file.name}.csv"), figure_csv(figure))
        save_png(svg, file.with_name(f"{file.name}.png"))


def default_title(drawn: Sequence[Figure]) -> str:
    sections = {figure.section for figure in drawn}
    return "Perplexity by window" if "text" in sections and "accuracy" not in sections else "Accuracy by length"
