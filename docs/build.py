"""Builds the documentation site into build/docs/site: gathers the pages, writes those that the code describes, and runs
mkdocs strictly, so that a dead link fails. Run it from the checkout, or as `make docs`.

The pages keep the places they have in the checkout (README.md, docs/, results/), so that one relative link works on the
site and in the repository alike.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import notebook
from methods_page import methods_page

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "build" / "docs" / "source"
TOP_PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE")
FOLDERS = {
    "docs": ("*.md", "*.ipynb", "*.css", "*.js"),
    "results": ("**/*.md", "**/*.png", "**/*.svg", "**/*.csv", "**/*.json", "**/*.jsonl", "**/*.html"),
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
    "traformer.models.exploring.ExploredModel.explore",
    "traformer.models.observe.observe",
    "traformer.tasks.Task",
    "traformer.runs.config.RunConfig",
    "traformer.training.loop.train",
    "traformer.evaluation.evaluate.evaluate_run",
    "traformer.reports.report",
    "traformer.reports.inline.Page",
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
    for page in SOURCE.rglob("*.md"):
        page.write_text(plain_fences(page.read_text(encoding="utf-8")), encoding="utf-8")


def plain_fences(text: str) -> str:
    """Code blocks without the words by which tests know them (`python run`), which the site would not take for code."""
    return re.sub(r"^(```\w+) .*$", r"\1", text, flags=re.MULTILINE)


def api_page() -> str:
    """Every public name, from its docstring."""
    entries = "\n".join(f"\n::: {name}\n" for name in API)
    return f"# API\n\nMade from the docstrings; `import traformer` offers the first of them.\n{entries}"


def main() -> int:
    gather()
    pages = {"methods": methods_page(ROOT / "results"), "api": api_page()}
    for path in (ROOT / "docs").glob("*.ipynb"):
        pages[path.stem] = notebook.markdown_page(notebook.read(path), path.name)
    for name, text in pages.items():
        (SOURCE / "docs" / f"{name}.md").write_text(text, encoding="utf-8")
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
