"""The page as people see it: in Chromium, in the light and in the dark, on a desk and on a telephone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from cgd.audit.folder import write_page
from support import audits
from support.browser import CONTRAST, OVERFLOWS, THEMES, WIDTHS, look, needed, opened, requests

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from selenium.webdriver import Chrome

pytestmark = [needed, pytest.mark.slow]

# Cells whose text is wider than they are, which then lies on their neighbours.
SPILLED = """
return [...document.querySelectorAll(".schemes td, .schemes th, figcaption, .answer li")]
  .filter(each => each.scrollWidth > each.clientWidth + 1).map(each => each.textContent.trim());
"""
PICTURES = """
return [...document.images].map(each => [each.naturalWidth, each.getBoundingClientRect().width,
  each.getBoundingClientRect().height, getComputedStyle(each).imageRendering]);
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    yield from opened(tmp_path_factory.mktemp("profile"))


def made(folder: Path, **how: Any) -> Path:
    return write_page(audits.write(folder, *audits.example(**how)))


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("how", [{}, {"kind": "spec", "wrong_control": True}, {"complete": False}])
def test_the_page_fits_and_asks_for_nothing(
    browser: Chrome, how: dict[str, Any], width: int, theme: str, tmp_path: Path
) -> None:
    path = made(tmp_path, **how)
    look(browser, path, width, theme)
    # The addresses of pictures hold the pictures: nothing is asked of anybody.
    assert [each for each in requests(browser) if not each.startswith("data:")] == [path.as_uri()]
    assert browser.get_log("browser") == []
    assert browser.execute_script("return innerWidth") == width
    assert not browser.execute_script(OVERFLOWS)
    spilled = browser.execute_script(SPILLED)
    assert spilled == []
    contrast, text = browser.execute_script(CONTRAST)
    assert contrast >= 4.5, text
    background = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") == (theme == "light")
    headline = browser.find_element("id", "headline")
    assert headline.rect["y"] + headline.rect["height"] < 300


@pytest.mark.parametrize("width", WIDTHS)
def test_pictures_are_drawn_large_enough_and_not_smoothed(browser: Chrome, width: int, tmp_path: Path) -> None:
    look(browser, made(tmp_path), width)
    pictures = browser.execute_script(PICTURES)
    assert len(pictures) == 4
    for natural, across, high, rendering in pictures:
        assert natural > 700  # eight records
        assert across > 200
        assert high > 20
        assert rendering == "pixelated"
    labels = [each.text for each in browser.find_elements("css selector", ".exhibits figure:first-child div > span")]
    assert labels == ["real", "recovered"]


def test_on_a_telephone_every_figure_says_whose_it_is(browser: Chrome, tmp_path: Path) -> None:
    look(browser, made(tmp_path), 400)
    told = 'return getComputedStyle(document.querySelector("#moments td.subject"), "::before").content'
    assert browser.execute_script(told) == '"CGD"'
    look(browser, made(tmp_path), 1280)
    assert browser.execute_script(told) == "none"


def test_it_prints(browser: Chrome, tmp_path: Path) -> None:
    look(browser, made(tmp_path), theme="dark")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    browser.execute_cdp_cmd(  # A4 between its margins, in pixels
        "Emulation.setDeviceMetricsOverride", {"width": 688, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
    )
    assert not browser.execute_script(OVERFLOWS)
    assert browser.execute_script(SPILLED) == []
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_a_page_with_faults_is_noticed(browser: Chrome, tmp_path: Path) -> None:
    """The control: what is new here fails on a page that is made badly (the rest has its control in the report's)."""
    path = tmp_path / "bad.html"
    path.write_text(
        '<table class="schemes"><td style="display: block; width: 2em">unbreakable</td></table><img src="data:x">'
    )
    look(browser, path)
    assert browser.execute_script(SPILLED) == ["unbreakable"]
    assert browser.execute_script(PICTURES)[0][0] == 0
