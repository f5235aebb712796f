"""Debian's Chromium, driven by selenium; a clear skip where it cannot be had. `make test-browser` installs both."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.browser.looking import Browser

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--disable-quic", "--no-first-run",
)  # fmt: skip


@pytest.fixture
def browser() -> Iterator[Browser]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="browser tests need the package selenium")
    from selenium.common.exceptions import WebDriverException

    driver_path, browser_path = shutil.which("chromedriver"), shutil.which("chromium")
    if driver_path is None or browser_path is None:
        pytest.skip("browser tests need chromium and chromedriver; `make test-browser` installs them on Debian")
    options = webdriver.ChromeOptions()
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    options.binary_location = browser_path
    try:
        driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver_path))
    except WebDriverException as error:
        pytest.skip(f"Chromium does not start: {error.msg}")
    yield Browser(driver)
    driver.quit()
