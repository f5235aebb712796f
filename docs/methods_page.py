"""The page of methods: an entry for each name of the catalogue, with formula, source, options and results."""

from __future__ import annotations

import csv
import inspect
from collections import defaultdict
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from docstrings import readable

if TYPE_CHECKING:
    from traformer.methods import Method

KINDS = {
    "tra": "TRA", "extension": "Extensions of TRA", "ablation": "Ablations of TRA",
    "left out": "tra_plus with a part left out", "peer": "Peers", "equal recipe": "Peers with tra_plus's recipe",
    "variant": "Peers with other options", "skyline": "Recurrent",
}  # fmt: skip

Shares = dict[tuple[str, str, int], list[float]]  # (task, split, length) -> a value for each seed


def methods_page(results: Path) -> str:
    """Markdown; `results` is the folder of committed results."""
    from traformer.methods import METHODS

    measured = {"peers": read_report(results / "peers"), "text": read_report(results / "text", "bits_per_byte")}
    fresh = read_cells(results / "what_works")
    parts = [
        "# Methods",
        "Every name that `--attention` and `TraformerConfig(attention=...)` take, from the catalogue "
        "(`traformer/methods.py`). Each entry repeats what its layer says of itself: formula, source and choices. "
        "Figures are means over seeds of the committed results; [evidence.md](evidence.md) and [peers.md](peers.md) "
        "say how they were made and what they show.",
        _contents(METHODS.values()),
    ]
    for method in METHODS.values():
        parts.append(f"## {heading(method)}\n\n{method.summary}")
        if method.is_configuration:
            options = ", ".join(f"`{name}={value!r}`" for name, value in method.options.items())
            norm = "" if method.qk_norm is None else f"QK-norm {'on' if method.qk_norm else 'off'}"
            of = METHODS[method.attention]
            changes = "; ".join(filter(None, [options, norm]))
            parts.append(f"A named configuration of [`{of.name}`](#{anchor(of)}): {changes}.")
        else:
            parts.append(_docstring(method))
            rows = [f"| `{name}` | `{one.default!r}` | {one.help} |" for name, one in method.option_table.items()]
            if rows:
                parts.append("\n".join(["| option | default | what it does |", "|---|---|---|", *rows]))
        parts += _results(method, measured, fresh)
    return "\n\n".join(parts) + "\n"


def _contents(methods: Iterable[Method]) -> str:
    """The names by kind, each a link."""
    by_kind = defaultdict(list)
    for method in methods:
        by_kind[method.kind].append(f"[`{method.name}`](#{anchor(method)})")
    rows = [f"| {KINDS.get(kind, kind)} | {', '.join(names)} |" for kind, names in by_kind.items()]
    return "\n".join(["| kind | names |", "|---|---|", *rows])


def heading(method: Method) -> str:
    return method.name if method.label == method.name else f"{method.label} ({method.name})"


def anchor(method: Method) -> str:
    """Where a method's heading is on the page."""
    from markdown.extensions.toc import slugify

    return slugify(heading(method), "-")


def _docstring(method: Method) -> str:
    """What the layer's file and class say of themselves: formulas, sources, choices."""
    place, _, name = method.layer.partition(":")
    module = import_module(place)
    texts = dict.fromkeys(inspect.cleandoc(found.__doc__ or "") for found in (module, getattr(module, name)))
    paragraphs = dict.fromkeys(paragraph for text in texts for paragraph in text.split("\n\n"))
    return "\n\n".join(readable(paragraph) for paragraph in paragraphs if paragraph != method.summary)


# Results ------------------------------------------------------------------------------------------------------------


def read_report(folder: Path, metric: str = "exact_match") -> dict[str, Shares]:
    """attention -> values of a report.csv."""
    found: dict[str, Shares] = defaultdict(lambda: defaultdict(list))
    with open(folder / "report.csv", encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            if row["metric"] == metric:
                found[row["attention"]][row["task"], row["split"], int(row["length"])].append(float(row["value"]))
    return found


def read_cells(folder: Path) -> dict[str, Shares]:
    """arm -> shares of an experiment under the protocol."""
    found: dict[str, Shares] = defaultdict(lambda: defaultdict(list))
    with open(folder / "cells.csv", encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            place = (row["setting"], row["split"], int(row["length"]))
            found[row["arm"]][place].append(int(row["right"]) / int(row["examples"]))
    return found


def _results(method: Method, measured: dict[str, dict[str, Shares]], fresh: dict[str, Shares]) -> list[str]:
    """A table of what was measured of the method, or a sentence that nothing was."""
    sources = [
        (
            "[what_works](../results/what_works/table.md)",
            fresh.get(method.name.removeprefix("tra_plus_"), {}),
            _percent,
        ),
        ("[peers](../results/peers/report.md)", measured["peers"].get(method.name, {}), _percent),
        ("[text](../results/text/report.md), bits per byte", measured["text"].get(method.name, {}), "{:.3f}".format),
    ]
    rows = []
    for source, shares, write in sources:
        by_split: dict[tuple[str, str], list[tuple[int, list[float]]]] = defaultdict(list)
        for (task, split, length), values in sorted(shares.items()):
            by_split[task, split].append((length, values))
        for (task, split), values in by_split.items():
            shown = ", ".join(f"{write(sum(each) / len(each))} at {length:,}" for length, each in values)
            rows.append(f"| {source} | {task} {'' if split == 'test' else split} | {shown} | {len(values[0][1])} |")
    if not rows:
        return ["No committed result has it yet."]
    head = ["| results | task | mean by length, the first within training | seeds |", "|---|---|---|---|"]
    return ["\n".join([*head, *rows])]


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
