"""The page of `tra explore` in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser.looking import EVIL, Browser
from tests.training.tiny import tiny_config
from traformer.cli import main
from traformer.evaluation.explore import explore_model
from traformer.evaluation.opened import OpenedRun
from traformer.reports.explore import explore_page
from traformer.training.loop import train

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    for attention in ("tra", "rope"):
        train(tiny_config(attention=attention, steps=2), folder / attention, quiet=True)
    return [folder / "tra", folder / "rope"]


@pytest.fixture(scope="module")
def page(runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("page") / "explore.html"
    assert main(["explore", *map(str, runs), "--lengths", "16,64,1k", "--out", str(out)]) == 0
    return out


def test_it_draws_without_a_complaint_and_asks_nobody_for_anything(browser: Browser, page: Path) -> None:
    browser.open(page)
    assert len(browser.find(".run")) == 2 and len(browser.find(".run:first-child .token")) == 16
    assert len(browser.find(".plots svg")) == 2
    assert browser.errors() == [] and browser.asked() == []


def test_a_click_and_the_arrow_keys_choose_the_query(browser: Browser, page: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    browser.open(page)
    browser.find(".run:first-child .token")[5].click()
    assert "query 5 " in browser.find(".run:first-child [aria-live]")[0].text
    browser.find(".run:first-child .tokens")[0].send_keys(Keys.ARROW_LEFT)
    assert "query 4 " in browser.find(".run:first-child [aria-live]")[0].text
    assert "query 4 " in browser.find(".run:last-child [aria-live]")[0].text  # the runs move together


def test_a_head_is_chosen_by_click_and_by_arrow(browser: Browser, page: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    browser.open(page)
    heads = browser.find(".run:first-child .head")
    heads[1].click()
    assert heads[1].get_attribute("aria-checked") == "true"
    heads[1].send_keys(Keys.ARROW_DOWN)
    assert heads[1].get_attribute("aria-checked") == "false"


def test_the_slider_grows_the_input_and_long_inputs_come_in_windows(browser: Browser, page: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    browser.open(page)
    slider = browser.find("#length")[0]
    before = [token.text for token in browser.find(".run:first-child .token")]
    slider.send_keys(Keys.ARROW_RIGHT)
    assert browser.find("#length-text")[0].text == "64 tokens"
    after = [token.text for token in browser.find(".run:first-child .token")]
    strip = [text.rstrip("✓✗") for text in before], [text.rstrip("✓✗") for text in after]
    assert strip[1][:14] + strip[1][-2:] == strip[0]  # the same example with more before its last read
    slider.send_keys(Keys.ARROW_RIGHT)
    assert browser.find("#length-text")[0].text == "1,024 tokens"
    assert len(browser.find(".run:first-child .token")) == 400
    first = browser.find(".run:first-child .window .sub")[0].text
    browser.find(".run:first-child .window button")[0].click()
    assert browser.find(".run:first-child .window .sub")[0].text != first
    assert browser.errors() == []


def test_kept_keys_are_drawn_at_their_contextual_distance_too(browser: Browser, page: Path) -> None:
    """The strip of a head that removes keys has a second part, and both parts have ink; a peer's has one."""
    browser.open(page)
    heights = browser.run("return [...document.querySelectorAll('.strip')].map((canvas) => canvas.clientHeight)")
    assert heights[0] > 2 * heights[1] > 0
    inked = browser.run(
        "const c = document.querySelector('.strip'), d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
        "const half = d.length / 2; return [d.slice(0, half).some((v) => v), d.slice(half).some((v) => v)]"
    )
    assert inked == [True, True]


def test_the_map_can_be_enlarged_and_says_what_is_under_the_pointer(browser: Browser, page: Path) -> None:
    from selenium.webdriver import ActionChains

    browser.open(page)
    summary = browser.find(".run:first-child summary")[0]
    assert "Enlarge the map of layer" in summary.text
    summary.click()
    assert browser.run("return document.querySelector('.large').width") == 16
    ActionChains(browser.driver).move_to_element(browser.find(".large")[0]).perform()
    assert "weight" in browser.find(".run:first-child details .sub")[0].text


def test_a_phone_needs_no_sideways_scrolling(browser: Browser, page: Path) -> None:
    browser.open(page, width=360)
    assert browser.overflow() <= 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_and_labels(browser: Browser, page: Path, scheme: str) -> None:
    browser.open(page, scheme=scheme)
    assert (browser.ground() == "rgb(255, 255, 255)") == (scheme == "light")
    browser.find(".run:first-child summary")[0].click()
    assert browser.violations() == []


def test_hostile_text_stays_text(browser: Browser, runs: list[Path], tmp_path: Path) -> None:
    model = OpenedRun.open(runs[0]).model
    path = tmp_path / "evil.html"
    explore_page(explore_model(model, [1, 4, 2], decode=lambda ids: EVIL, title=EVIL)).save(path)
    browser.open(path)
    assert browser.driver.title == EVIL and not browser.find("img")
    assert EVIL in browser.find(".token")[0].text
