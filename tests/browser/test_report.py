"""The page of `tra report` in a real browser: few methods and many, hostile names, phone, dark, keyboard."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser.looking import EVIL, Browser
from tests.reports.made import make_run, measurement
from tests.training.tiny import tiny_config
from traformer.methods import METHODS
from traformer.reports.collect import collect
from traformer.reports.write import write_report

pytestmark = pytest.mark.browser

NAME = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods, one with two seeds, and one whose folder and note are hostile."""
    folder = tmp_path_factory.mktemp("few")
    for seed in (0, 1):
        make_run(folder / f"tra-{seed}", [1.0, 0.9 - seed / 4, 0.5, 0.0], seed=seed)
    evil = make_run(folder / NAME, [1.0, 0.4, 0.1], "rope")
    config = tiny_config(attention="rope")
    evil.results.write([*evil.results.read(), measurement(config, 96, None, note=EVIL)])
    return write_report(collect([folder]), tmp_path_factory.mktemp("report"), title=EVIL)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many")
    for place, name in enumerate(list(METHODS)[:12]):
        make_run(folder / name, [1.0, 1 - place / 12, 0.5 - place / 30], attention=name)
    return write_report(collect([folder]), tmp_path_factory.mktemp("report"))


@pytest.fixture(params=["few", "many"])
def page(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


def test_it_shows_without_a_complaint_and_asks_nobody_for_anything(browser: Browser, page: Path) -> None:
    browser.open(page)
    assert browser.find("figure svg") and browser.find("table")
    assert browser.errors() == [] and browser.asked() == []


def test_hostile_names_stay_text(browser: Browser, few: Path) -> None:
    browser.open(few)
    assert browser.driver.title == EVIL and browser.find("h1")[0].text == EVIL and not browser.find("img")
    assert any(EVIL in cell.text for cell in browser.find("td")) and NAME in browser.find("main")[0].text


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_labels_and_reach_by_keyboard(browser: Browser, page: Path, scheme: str) -> None:
    browser.open(page, scheme=scheme)
    assert (browser.ground() == "rgb(255, 255, 255)") == (scheme == "light")
    browser.run("document.querySelectorAll('details').forEach((part) => { part.open = true })")
    assert browser.violations() == []


def test_a_phone_needs_no_sideways_scrolling_of_the_page(browser: Browser, page: Path) -> None:
    browser.open(page, width=360)
    assert browser.overflow() <= 0
    narrowest = browser.run("return Math.min(...[...document.querySelectorAll('.plot')].map((p) => p.clientWidth))")
    assert narrowest > 250
    scrolled = browser.run(
        "const tables = [...document.querySelectorAll('.scroll:has(td)')];"
        "const wide = tables.find((box) => box.scrollWidth > box.clientWidth);"
        "wide.scrollLeft = 200;"
        "return wide.querySelector('td').getBoundingClientRect().left - wide.getBoundingClientRect().left"
    )
    assert scrolled == 0  # the first column stays in view


def test_every_figure_can_be_had_as_a_file(browser: Browser, page: Path) -> None:
    browser.open(page)
    links = [link.get_attribute("href") for link in browser.find(".downloads a")]
    figures = len(browser.find("figure"))
    assert figures and len(links) == 3 * figures
    for kind in ("png", "svg", "csv"):
        assert sum(link.endswith(f".{kind}") for link in links) == figures
    for link in links:
        assert Path(link.removeprefix("file://")).stat().st_size > 0


def test_a_drawn_figure_opens_as_a_file(browser: Browser, few: Path) -> None:
    picture = next((few.parent / "figures").glob("*.svg"))
    browser.open(picture)
    assert browser.run("return document.querySelector('.line').getBoundingClientRect().width") > 100
    assert browser.errors() == [] and browser.asked() == []
