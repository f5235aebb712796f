"""What the tests of every page ask a browser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

EVIL = "</script><img src=x onerror=\"document.title='broken'\">"


class Browser:
    """A page in Chromium."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, page: Path, width: int = 1280, scheme: str = "light") -> None:
        feature = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", feature)
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.driver.get(page.as_uri())

    def find(self, selector: str) -> list[Any]:
        return self.driver.find_elements("css selector", selector)

    def run(self, script: str) -> Any:
        return self.driver.execute_script(script)

    def errors(self) -> list[str]:
        """What the console complains of."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]

    def asked(self) -> list[str]:
        """Every address beyond the disk that was asked for."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        urls = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
        return [url for url in urls if not url.startswith(("file:", "data:", "about:"))]

    def overflow(self) -> int:
        """Pixels by which the page is wider than the window."""
        return self.run("return document.documentElement.scrollWidth - window.innerWidth")

    def ground(self) -> str:
        return self.run("return getComputedStyle(document.body).backgroundColor")

    def violations(self, within: str = "document") -> list[tuple[str, list[str]]]:
        """What axe-core finds wrong: contrast, labels, roles, reach by keyboard."""
        axe = pytest.importorskip("axe_core_python", reason="the accessibility check needs the package axe-core-python")
        self.run((Path(axe.__file__).parent / "axe.min.js").read_text(encoding="utf-8"))
        found = self.driver.execute_async_script(
            f"const done = arguments[0]; axe.run({within}).then((result) => done(result.violations))"
        )
        return [(item["id"], [node["html"] for node in item["nodes"]][:3]) for item in found]
