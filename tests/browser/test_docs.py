"""The documentation site in a real browser, opened from disk: nothing is loaded from elsewhere, and search works."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser.looking import Browser
from tests.docs.test_site import build, link_checkout

pytestmark = pytest.mark.browser

PAGES = ("index", "docs/methods", "docs/api", "docs/kernel", "docs/tutorial", "CHANGELOG")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkout = link_checkout(tmp_path_factory.mktemp("checkout"))
    built = build(checkout)
    assert built.returncode == 0, built.stderr
    return checkout / "build" / "docs" / "site"


@pytest.mark.parametrize("name", PAGES)
def test_a_page_needs_nothing_from_elsewhere(browser: Browser, site: Path, name: str) -> None:
    browser.open(site / f"{name}.html")
    assert browser.find("article h1")
    assert browser.errors() == [] and browser.asked() == []
    missing = "return [...document.images].filter((image) => !image.naturalWidth).map((image) => image.src)"
    assert browser.run(missing) == []


def test_the_first_screen_has_the_figure_and_the_commands(browser: Browser, site: Path) -> None:
    browser.open(site / "index.html")
    picture = browser.find("article img")[0]
    assert picture.rect["y"] + picture.rect["height"] < 700 and picture.get_attribute("alt")
    command = next(block for block in browser.find("article pre") if "make demo" in block.text)
    assert command.rect["y"] < 800


def test_search_works_from_disk(browser: Browser, site: Path) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    browser.open(site / "index.html")
    browser.find("[data-md-component=search-query]")[0].send_keys("surrogate")
    said = WebDriverWait(browser.driver, 20).until(
        lambda _: next((one.text for one in browser.find(".md-search-result__meta") if "matching" in one.text), None)
    )
    assert "matching document" in said and browser.errors() == [] and browser.asked() == []


@pytest.mark.parametrize("name", ["index", "docs/methods"])
def test_a_phone_and_the_dark(browser: Browser, site: Path, name: str) -> None:
    browser.open(site / f"{name}.html", width=360, scheme="dark")
    assert browser.overflow() <= 0
    assert browser.errors() == []
