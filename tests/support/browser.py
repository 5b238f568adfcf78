"""Headless Chromium for tests of HTML pages, and scripts that inspect a page in it."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from selenium.webdriver import Chrome

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(
    BROWSER is None or DRIVER is None, reason="Chromium and its driver are not installed (chromium, chromium-driver)"
)

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
WIDTHS = (1280, 400)
THEMES = ("light", "dark")

OVERFLOWS = "return document.documentElement.scrollWidth > document.documentElement.clientWidth"
# The lowest contrast (WCAG 2) of a text with its background, and that text. Half-transparent backgrounds are blended as
# the browser does.
CONTRAST = """
const parts = colour => { const v = colour.match(/[\\d.]+/g).map(Number); return v.length < 4 ? [...v, 1] : v; };
const behind = element => {
  if (!element) return [255, 255, 255];
  const [r, g, b, a] = parts(getComputedStyle(element).backgroundColor);
  return a === 1 ? [r, g, b] : behind(element.parentElement).map((under, i) => under * (1 - a) + [r, g, b][i] * a);
};
const light = colour => {
  const [r, g, b] = colour.map(v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
let worst = [99, ""];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement, text = walker.currentNode.textContent.trim();
  if (!text || ["title", "desc", "STYLE"].includes(element.tagName)) continue;
  const style = getComputedStyle(element);
  const front = parts(element instanceof SVGElement ? style.fill : style.color).slice(0, 3);
  const [low, high] = [light(front), light(behind(element))].sort((a, b) => a - b);
  const contrast = (high + 0.05) / (low + 0.05);
  if (contrast < worst[0]) worst = [contrast, text];
}
return worst;
"""


def start_browser(profile: Path) -> Iterator[Chrome]:
    """Start a browser, for a fixture to yield from."""
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = str(BROWSER)
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = Chrome(options=options, service=Service(executable_path=str(DRIVER)))
    yield driver
    driver.quit()


def open_page(browser: Chrome, path: Path, width: int = 1280, theme: str = "light") -> None:
    """Open a page in a window of this width, and clear the logs."""
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    )
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": theme}]}
    )
    browser.get("about:blank")
    for log in ("browser", "performance"):
        browser.get_log(log)
    browser.get(path.as_uri())


def requests(browser: Chrome) -> list[str]:
    """Return every URL that the page requested."""
    entries = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [entry["params"]["request"]["url"] for entry in entries if entry["method"] == "Network.requestWillBeSent"]
