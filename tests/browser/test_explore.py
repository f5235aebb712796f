"""The page of `tra explore` in a real browser: `make test-browser` installs Chromium's driver and runs this."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.training.tiny import tiny_config
from traformer.cli import main
from traformer.evaluation.explore import explore_model
from traformer.evaluation.opened import OpenedRun
from traformer.reports.explore import explore_page
from traformer.training.loop import train

pytestmark = pytest.mark.browser

EVIL = "</script><img src=x onerror=\"document.title='broken'\">"


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


@pytest.fixture
def browser() -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="browser tests need the package selenium")
    from selenium.common.exceptions import WebDriverException

    options = webdriver.ChromeOptions()
    for flag in ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver_path, browser_path = shutil.which("chromedriver"), shutil.which("chromium")
    if driver_path is None or browser_path is None:
        pytest.skip("browser tests need chromium and chromedriver; `make test-browser` installs them on Debian")
    options.binary_location = browser_path
    try:
        driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver_path))
    except WebDriverException as error:
        pytest.skip(f"Chromium does not start: {error.msg}")
    yield driver
    driver.quit()


def open_page(browser: Any, page: Path, width: int = 1280) -> None:
    browser.set_window_size(width, 900)
    browser.get(page.as_uri())


def find(browser: Any, selector: str) -> list[Any]:
    return browser.find_elements("css selector", selector)


def complaints(browser: Any) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def test_it_draws_without_a_complaint_and_asks_nobody_for_anything(browser: Any, page: Path) -> None:
    open_page(browser, page)
    assert len(find(browser, ".run")) == 2 and len(find(browser, ".run:first-child .token")) == 16
    assert complaints(browser) == []
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    assert all(url.startswith(("file:", "data:")) for url in asked)


def test_a_click_and_the_arrow_keys_choose_the_query(browser: Any, page: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    open_page(browser, page)
    find(browser, ".run:first-child .token")[5].click()
    assert "query 5 " in find(browser, ".run:first-child [aria-live]")[0].text
    find(browser, ".run:first-child .tokens")[0].send_keys(Keys.ARROW_LEFT)
    assert "query 4 " in find(browser, ".run:first-child [aria-live]")[0].text
    assert "query 4 " in find(browser, ".run:last-child [aria-live]")[0].text  # the runs move together


def test_a_head_is_chosen_by_click_and_by_arrow(browser: Any, page: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    open_page(browser, page)
    heads = find(browser, ".run:first-child .head")
    heads[1].click()
    assert heads[1].get_attribute("aria-checked") == "true"
    heads[1].send_keys(Keys.ARROW_DOWN)
    assert heads[1].get_attribute("aria-checked") == "false"


def test_the_slider_grows_the_input_and_long_inputs_come_in_windows(browser: Any, page: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    open_page(browser, page)
    slider = find(browser, "#length")[0]
    slider.send_keys(Keys.ARROW_RIGHT)
    assert find(browser, "#length-text")[0].text == "64 tokens"
    slider.send_keys(Keys.ARROW_RIGHT)
    assert find(browser, "#length-text")[0].text == "1,024 tokens"
    assert len(find(browser, ".run:first-child .token")) == 400
    first = find(browser, ".run:first-child .window .sub")[0].text
    find(browser, ".run:first-child .window button")[0].click()
    assert find(browser, ".run:first-child .window .sub")[0].text != first
    assert complaints(browser) == []


def test_the_map_can_be_enlarged(browser: Any, page: Path) -> None:
    open_page(browser, page)
    find(browser, ".run:first-child summary")[0].click()
    assert browser.execute_script("return document.querySelector('.large').width") == 16


def test_a_phone_needs_no_sideways_scrolling(browser: Any, page: Path) -> None:
    open_page(browser, page)
    metrics = {"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 360


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_and_labels(browser: Any, page: Path, scheme: str) -> None:
    axe = pytest.importorskip("axe_core_python", reason="the accessibility check needs the package axe-core-python")
    feature = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", feature)
    open_page(browser, page)
    ground = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") == (scheme == "light")
    browser.execute_script((Path(axe.__file__).parent / "axe.min.js").read_text(encoding="utf-8"))
    found = browser.execute_async_script(
        "const done = arguments[0]; axe.run().then((result) => done(result.violations))"
    )
    assert [(item["id"], [node["html"] for node in item["nodes"]][:3]) for item in found] == []


def test_hostile_text_stays_text(browser: Any, runs: list[Path], tmp_path: Path) -> None:
    model = OpenedRun.open(runs[0]).model
    path = tmp_path / "evil.html"
    explore_page(explore_model(model, [1, 4, 2], decode=lambda ids: EVIL, title=EVIL)).save(path)
    open_page(browser, path)
    assert browser.title == EVIL and not find(browser, "img")
    assert EVIL in find(browser, ".token")[0].text
