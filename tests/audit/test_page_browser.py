"""The page in Chromium: with a light and a dark theme, on a wide and on a narrow screen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from cgd.audit.report import write_page
from support import audits
from support.browser import CONTRAST, OVERFLOWS, THEMES, WIDTHS, needs_browser, open_page, requests, start_browser

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from selenium.webdriver import Chrome

    from support.audits import Kind

pytestmark = [needs_browser, pytest.mark.slow]

# The texts of cells that are wider than the cell, and overlap its neighbours.
OVERFLOWING_CELLS = """
return [...document.querySelectorAll(".schemes td, .schemes th, figcaption, .summary li")]
  .filter(each => each.scrollWidth > each.clientWidth + 1).map(each => each.textContent.trim());
"""
PICTURES = """
return [...document.images].map(each => [each.naturalWidth, each.getBoundingClientRect().width,
  each.getBoundingClientRect().height, getComputedStyle(each).imageRendering]);
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    yield from start_browser(tmp_path_factory.mktemp("profile"))


def write_example(folder: Path, **options: Any) -> Path:
    return write_page(audits.write(folder, audits.example(**options)))


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    "options", [{}, {"kind": "spec", "failed_control": True}, {"complete": False}, {"kind": "table"}]
)
def test_page_fits_and_requests_nothing(
    browser: Chrome, options: dict[str, Any], width: int, theme: str, tmp_path: Path
) -> None:
    path = write_example(tmp_path, **options)
    open_page(browser, path, width, theme)
    # The addresses of pictures contain the pictures.
    assert [each for each in requests(browser) if not each.startswith("data:")] == [path.as_uri()]
    assert browser.get_log("browser") == []
    assert browser.execute_script("return innerWidth") == width
    assert not browser.execute_script(OVERFLOWS)
    assert browser.execute_script(OVERFLOWING_CELLS) == []
    contrast, text = browser.execute_script(CONTRAST)
    assert contrast >= 4.5, text
    background = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") == (theme == "light")
    headline = browser.find_element("id", "headline")
    assert headline.rect["y"] + headline.rect["height"] < 300


@pytest.mark.parametrize("width", WIDTHS)
def test_pictures_are_large_and_not_smoothed(browser: Chrome, width: int, tmp_path: Path) -> None:
    open_page(browser, write_example(tmp_path), width)
    pictures = browser.execute_script(PICTURES)
    assert len(pictures) == 4
    for natural, width_shown, height_shown, rendering in pictures:
        assert natural > 700  # eight records
        assert width_shown > 200
        assert height_shown > 20
        assert rendering == "pixelated"
    labels = [each.text for each in browser.find_elements("css selector", ".images figure:first-child div > span")]
    assert labels == ["real", "recovered"]


def test_narrow_page_labels_every_cell_with_its_scheme(browser: Chrome, tmp_path: Path) -> None:
    open_page(browser, write_example(tmp_path), 400)
    label = 'return getComputedStyle(document.querySelector("#moments td.subject"), "::before").content'
    assert browser.execute_script(label) == '"CGD"'
    open_page(browser, write_example(tmp_path), 1280)
    assert browser.execute_script(label) == "none"


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_wide_list_of_records_scrolls_within_the_page(browser: Chrome, width: int, theme: str, tmp_path: Path) -> None:
    open_page(browser, write_example(tmp_path, kind="table"), width, theme)
    lists = browser.find_elements("css selector", ".records")
    assert len(lists) == 1
    [shown] = lists
    assert browser.execute_script("return arguments[0].scrollWidth > arguments[0].clientWidth", shown)
    assert shown.rect["width"] <= width
    assert len(shown.find_elements("css selector", "tbody")) == 20
    browser.execute_script("arguments[0].focus(); arguments[0].scrollLeft = 1e6", shown)
    assert browser.execute_script("return document.activeElement === arguments[0]", shown)  # by the keyboard, too
    assert browser.execute_script("return arguments[0].scrollLeft", shown) > 100
    assert browser.get_log("browser") == []


@pytest.mark.parametrize("kind", ["embedded", "table"])
def test_page_can_be_printed(browser: Chrome, kind: Kind, tmp_path: Path) -> None:
    open_page(browser, write_example(tmp_path, kind=kind), theme="dark")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    browser.execute_cdp_cmd(  # A4 between its margins, in pixels
        "Emulation.setDeviceMetricsOverride", {"width": 688, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
    )
    assert not browser.execute_script(OVERFLOWS)
    assert browser.execute_script(OVERFLOWING_CELLS) == []
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_checks_detect_a_bad_page(browser: Chrome, tmp_path: Path) -> None:
    """The control of the checks in this file; those of `support.browser` have theirs in the report's tests."""
    path = tmp_path / "bad.html"
    path.write_text(
        '<table class="schemes"><td style="display: block; width: 2em">unbreakable</td></table><img src="data:x">'
    )
    open_page(browser, path)
    assert browser.execute_script(OVERFLOWING_CELLS) == ["unbreakable"]
    assert browser.execute_script(PICTURES)[0][0] == 0
