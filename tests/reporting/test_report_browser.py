"""The report in Chromium: light and dark mode, desktop and phone widths."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from cgd.reporting.training_report import write_report
from support import runs
from support.browser import CONTRAST, OVERFLOWS, THEMES, WIDTHS, needs_browser, open_page, requests, start_browser

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from selenium.webdriver import Chrome

pytestmark = [needs_browser, pytest.mark.slow]

RUNS = [runs.classification, runs.many_classes, runs.regression, runs.without_validation, runs.grid, runs.minimal]

# Labels of a chart that leave it or overlap. The boxes of a text are slightly higher than its letters.
OVERLAPS = """
const faults = [];
for (const svg of document.querySelectorAll(".chart > svg")) {
  const frame = svg.getBoundingClientRect();
  const boxes = [...svg.querySelectorAll("text")].map(text => [text.textContent, text.getBoundingClientRect()]);
  boxes.forEach(([text, box], i) => {
    const out = [frame.left - box.left, box.right - frame.right, frame.top - box.top, box.bottom - frame.bottom];
    if (Math.max(...out) > 1) faults.push(`${text} leaves ${svg.id}`);
    for (const [other, its] of boxes.slice(i + 1)) {
      const across = box.left < its.right && its.left < box.right;
      const along = box.top < its.bottom - 3 && its.top < box.bottom - 3;
      if (across && along) faults.push(`${text} and ${other} in ${svg.id}`);
    }
  });
}
return faults;
"""


# Names of rows that are broken into more than three lines, because other columns leave no room.
NARROW_NAMES = """
return [...document.querySelectorAll(".ranges tbody th, .weights tbody th, .thresholds tbody th")]
  .filter(cell => cell.getBoundingClientRect().height > 90).map(cell => cell.textContent);
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    yield from start_browser(tmp_path_factory.mktemp("profile"))


def visible(browser: Chrome, *ids: str) -> bool:
    boxes: list[dict[str, Any]] = [browser.find_element("id", name).rect for name in ids]
    displayed = all(browser.find_element("id", name).is_displayed() for name in ids)
    return displayed and all(box["width"] > 150 and box["height"] > 40 for box in boxes)


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("make", RUNS)
def test_page_fits_and_requests_nothing(
    browser: Chrome, make: Callable[[], runs.Run], width: int, theme: str, tmp_path: Path
) -> None:
    *_, path = write_report(runs.write(make(), tmp_path))
    open_page(browser, path, width, theme)
    assert requests(browser) == [path.as_uri()]
    assert browser.get_log("browser") == []
    assert browser.execute_script("return innerWidth") == width
    assert not browser.execute_script(OVERFLOWS)
    contrast, text = browser.execute_script(CONTRAST)
    assert contrast >= 4.5, text
    background = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") == (theme == "light")


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_main_parts_are_visible(browser: Chrome, width: int, theme: str, tmp_path: Path) -> None:
    *_, path = write_report(runs.write(runs.classification(), tmp_path / "classification"))
    open_page(browser, path, width, theme)
    assert visible(browser, "headline", "chart-loss", "chart-score", "confusion", "chart-roc", "revealed", "notes")
    assert visible(browser, "compared-1", "compared-2", "chart-calibration", "thresholds", "subgroup-1", "subgroup-3")
    assert visible(browser, "importance-rows", "coefficient-rows")
    assert browser.execute_script(NARROW_NAMES) == []
    headline = browser.find_element("id", "headline")
    assert headline.rect["y"] + headline.rect["height"] < 500  # without scrolling
    assert browser.save_screenshot(str(tmp_path / "classification.png"))
    assert (tmp_path / "classification.png").stat().st_size > 10_000
    *_, path = write_report(runs.write(runs.regression(), tmp_path / "regression"))
    open_page(browser, path, width, theme)
    assert visible(browser, "headline", "chart-loss", "chart-score", "chart-scatter", "chart-residuals", "revealed")
    assert visible(browser, "compared-1", "compared-2", "subgroup-1", "importance-rows", "coefficient-rows")
    assert browser.execute_script(NARROW_NAMES) == []


def test_chart_labels_do_not_overlap_or_leave_the_chart(browser: Chrome, tmp_path: Path) -> None:
    for make in (runs.classification, runs.regression):
        for width in WIDTHS:
            *_, path = write_report(runs.write(make(), tmp_path))
            open_page(browser, path, width)
            faults = browser.execute_script(OVERLAPS)
            assert faults == []


def test_dots_and_intervals_are_at_the_positions_of_their_values(browser: Chrome, tmp_path: Path) -> None:
    run = runs.classification()
    *_, path = write_report(runs.write(run, tmp_path))
    open_page(browser, path)
    script = """
    return [...document.querySelectorAll("#compared-1 .range div")].map(bar => {
      const [frame, dot, span] = [bar, bar.querySelector(".dot"), bar.querySelector(".span")]
        .map(each => each.getBoundingClientRect());
      return [(dot.left + dot.right) / 2, span.left, span.right].map(at => (at - frame.left) / frame.width);
    });
    """
    alone, together = browser.execute_script(script)
    first, second = (each["scores"]["accuracy"] for each in run["comparison"]["models"])
    # The axis is linear: distances on the page are in proportion to differences of the scores.
    scale = (together[0] - alone[0]) / (second["value"] - first["value"])
    for found, score in ((alone, first), (together, second)):
        expected = [found[0] + scale * (score[end] - score["value"]) for end in ("low", "high")]
        assert found[1:] == pytest.approx(expected, abs=0.02)


def test_names_from_files_do_not_run_as_code(browser: Chrome, tmp_path: Path) -> None:
    injected = "<script>document.title='gone'</script><img src=x onerror=\"document.title='gone'\">"
    run = runs.classification()
    run |= {"participant": injected, "notes": [injected]}
    run["federation"]["participants"] = [injected, "b", "c"]
    run["columns"] = [{"name": injected, "type": "category", "categories": {injected: 3}}]
    run["validation"]["classes"] = [injected, "b"]
    *_, path = write_report(runs.write(run, tmp_path))
    for width in WIDTHS:
        open_page(browser, path, width)
        assert "gone" not in browser.title.split("'")[0]
        assert browser.execute_script("return document.querySelectorAll('script, img').length") == 0
        assert requests(browser) == [path.as_uri()]
        assert browser.get_log("browser") == []
        assert not browser.execute_script(OVERFLOWS)
        assert injected in browser.find_element("id", "participants").text


def test_page_prints_light_and_without_overflow(browser: Chrome, tmp_path: Path) -> None:
    *_, path = write_report(runs.write(runs.many_classes(), tmp_path))
    open_page(browser, path, theme="dark")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    background = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert background == "rgb(255, 255, 255)"  # also in dark mode
    browser.execute_cdp_cmd(  # A4 between its margins, in pixels
        "Emulation.setDeviceMetricsOverride", {"width": 688, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
    )
    assert not browser.execute_script(OVERFLOWS)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_checks_detect_a_faulty_page(browser: Chrome, tmp_path: Path) -> None:
    """Each of the checks above fails on a faulty page."""
    path = tmp_path / "bad.html"
    path.write_text(
        '<body style="background: #fff"><p style="color: #bbb">pale</p><div style="width: 2000px">wide</div>'
        '<img src="http://127.0.0.1:9/x.png"><script>console.error("loud")</script>'
    )
    open_page(browser, path)
    assert "http://127.0.0.1:9/x.png" in requests(browser)
    assert any("loud" in entry["message"] for entry in browser.get_log("browser"))
    assert browser.execute_script(OVERFLOWS)
    contrast, text = browser.execute_script(CONTRAST)
    assert (round(contrast, 1), text) == (1.9, "pale")
