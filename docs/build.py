"""Builds the documentation site into build/docs/site: gathers the pages, writes those that the code describes, and runs
mkdocs strictly, so that a dead link fails. Run it from the checkout, or as `make docs`.

The pages keep the places they have in the checkout (README.md, docs/, results/), so that one relative link works on the
site and in the repository alike.
"""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from traformer.methods import Method

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "build" / "docs" / "source"
TOP_PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE")
FOLDERS = {
    "docs": ("*.md",),
    "results": ("**/*.md", "**/*.png", "**/*.svg", "**/*.csv", "**/*.json"),
    "examples": ("*",),
}

# What the API page shows, in its order.
API = (
    "traformer.layers.ThresholdRelativeAttention",
    "traformer.ops.threshold_relative_attention",
    "traformer.ops.attention_map",
    "traformer.ops.attention_stats",
    "traformer.ops.available_backends",
    "traformer.models.TraformerConfig",
    "traformer.models.TraformerForCausalLM",
    "traformer.models.conversion.convert.convert",
    "traformer.tasks.Task",
    "traformer.runs.config.RunConfig",
    "traformer.training.loop.train",
)


def gather() -> None:
    """All pages and figures, at the places they have in the checkout."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    SOURCE.mkdir(parents=True)
    for name in TOP_PAGES:
        shutil.copy(ROOT / name, SOURCE / name)
    for folder, patterns in FOLDERS.items():
        for pattern in patterns:
            for path in sorted((ROOT / folder).glob(pattern)):
                if path.is_file():
                    copy = SOURCE / path.relative_to(ROOT)
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(path, copy)


def api_page() -> str:
    """Every public name, from its docstring."""
    entries = "\n".join(f"\n::: {name}\n" for name in API)
    return f"# API\n\nMade from the docstrings; `import traformer` offers the first of them.\n{entries}"


def methods_page() -> str:
    """Every method of the catalogue: what it is, its options and what it can do."""
    from traformer.methods import METHODS

    parts = [
        "# Methods",
        "Every name that `--attention` and `TraformerConfig(attention=...)` take, from the catalogue "
        "(`traformer/methods.py`). Each entry repeats what its layer says of itself.",
    ]
    for method in METHODS.values():
        parts.append(f"## {heading(method)}\n\n{method.summary}")
        if method.is_configuration:
            options = ", ".join(f"`{name}={value!r}`" for name, value in method.options.items()) or "QK-norm apart"
            parts.append(
                f"A named configuration of [`{method.attention}`](#{anchor(METHODS[method.attention])}): {options}."
            )
        else:
            parts.append(layer_docstring(method))
            rows = [
                f"| `{name}` | `{option.default!r}` | {option.help} |" for name, option in method.option_table.items()
            ]
            if rows:
                parts.append("\n".join(["| option | default | what it does |", "|---|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def heading(method: Method) -> str:
    return method.name if method.label == method.name else f"{method.label} ({method.name})"


def anchor(method: Method) -> str:
    """Where a method's heading is on the page."""
    from markdown.extensions.toc import slugify

    return slugify(heading(method), "-")


def layer_docstring(method: Method) -> str:
    """What the layer's file and class say of themselves, as preformatted text: it holds formulas and sources."""
    place, _, name = method.layer.partition(":")
    module = import_module(place)
    texts = dict.fromkeys(inspect.cleandoc(found.__doc__ or "") for found in (module, getattr(module, name)))
    return "```text\n" + "\n\n".join(texts) + "\n```"


def main() -> int:
    gather()
    (SOURCE / "docs" / "methods.md").write_text(methods_page(), encoding="utf-8")
    (SOURCE / "docs" / "api.md").write_text(api_page(), encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", "mkdocs.yml"]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if built.returncode:
        print(built.stdout + built.stderr, file=sys.stderr)
    else:
        print("the site is in build/docs/site/index.html")
    return built.returncode


if __name__ == "__main__":
    raise SystemExit(main())
