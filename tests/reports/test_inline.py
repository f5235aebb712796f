"""Pages as a notebook shows them."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import torch

from tests.reports.made import make_run
from traformer.models import TraformerConfig, TraformerForCausalLM
from traformer.reports import report
from traformer.reports.inline import Page

EVIL = '"><script>alert(1)</script>&amp;'


class Frames(HTMLParser):
    """Every element that the notebook itself would get."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))


def test_the_cell_holds_one_frame_with_the_page_in_it() -> None:
    page = Page(EVIL, f"<!doctype html><p title='a \"b\"'>{EVIL}</p>")
    ((tag, attributes),) = Frames(page._repr_html_()).elements
    assert tag == "iframe" and attributes["srcdoc"] == page.html and attributes["title"] == EVIL
    assert attributes["sandbox"] == "allow-scripts"  # and nothing else: the notebook is out of its reach


def test_a_model_is_explored_in_a_cell(tmp_path: Path) -> None:
    config = TraformerConfig(vocab_size=9, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    page = TraformerForCausalLM(config).explore(torch.tensor([1, 2, 3]), decode=lambda ids: f"word {ids[0]}")
    assert page.title == "Inside TRA" and "word 2" in page.html and "Trained to" not in page.html
    assert Frames(page._repr_html_()).elements[0][1]["srcdoc"] == page.html
    assert page.save(tmp_path / "page.html").read_text(encoding="utf-8") == page.html
    assert len(repr(page)) < 200


def test_a_report_in_a_cell(tmp_path: Path) -> None:
    make_run(tmp_path / "run", [1.0, 0.5])
    page = report(tmp_path)
    assert page.title in page.html and "<svg" in page.html
    assert "figures/" not in page.html  # no link to files that were not written
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
