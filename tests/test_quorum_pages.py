"""The figures about a quorum in the documentation are those of the results, and of the formulas."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from cgd.dp.mechanism import NoisyEncoding
from cgd.federation.absence_section import ABSENCE_REVEALS_GRADIENTS, MIN_PATIENCE, availability
from cgd.secagg.federation_spec import tolerated_members
from support.pages import load_script

ROOT = Path(__file__).parents[1]


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def rows(text: str, heading: str) -> list[list[str]]:
    """Return the cells of the first table after a heading."""
    [table] = re.findall(r"^\|---.*\n((?:\|.*\n)+)", text.split(heading, 1)[1], re.M)[:1]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def test_table_of_absences_is_that_of_the_results() -> None:
    made = load_script("absences", "benchmarks")
    found = json.loads((ROOT / "results" / "absences.json").read_text())
    shown = page("threat-model.md").split("<!-- absences -->\n", 1)[1].split("\n<!-- end -->", 1)[0]
    assert shown == made.table(found)


def test_results_of_noise_and_of_too_many_colluders_are_as_stated() -> None:
    found = json.loads((ROOT / "results" / "absences.json").read_text())
    private = [value for name, values in found.items() if ", dp" in name for value in values]
    assert len(private) == 15
    assert min(private) > 0.99
    assert max(found["alone"]) < 0.00001


def test_availability_and_tolerated_members_of_the_table() -> None:
    shown = rows(page("operations.md"), "**Choose the quorum**")
    assert len(shown) == 8
    for members, quorum, tolerated, *parts in shown:
        least = int(members) if quorum == "all" else int(quorum)
        assert int(tolerated) == tolerated_members(int(members), None if quorum == "all" else least)
        expected = [f"{100 * availability(int(members), least, each):.3f} %" for each in (0.99, 0.95)]
        assert parts == expected


def test_keys_of_the_section_are_as_stated() -> None:
    text = page("operations.md")
    assert f'accept = "{ABSENCE_REVEALS_GRADIENTS}"' in text
    assert f"at least {MIN_PATIENCE:g}, because silence is noticed after 4" in text


@pytest.mark.parametrize("row", rows(page("differential-privacy.md"), "### A quorum"), ids=", ".join)
def test_noise_of_a_quorum_is_as_stated(row: list[str]) -> None:
    members, quorum, colluders, noise, factor = row

    def sigma(quorum: int | None) -> float:
        encoding = NoisyEncoding(
            clip=1.0,
            denominator=1000.0,
            dimension=10,
            members=int(members),
            colluders=int(colluders),
            max_mu=0.05,
            max_records=1200,
            quorum=quorum,
        )
        return encoding.sigma_total * 1000 * 0.05

    found = sigma(None if quorum == "none" else int(quorum))
    assert f"{found:.2f}" == noise
    assert found / sigma(None) == pytest.approx(float(factor), abs=0.006)
    assert math.isfinite(found)


def test_every_reason_to_wait_is_explained() -> None:
    sources = [(ROOT / "src" / "cgd" / "secagg" / name).read_text() for name in ("membership.py", "view_change.py")]
    reasons = {text for source in sources for text in re.findall(r'return "([a-zA-Z: ]+)", ', source)} - {"nothing"}
    assert {"its report", "agreement on who is present", "its part in a sum that may have been opened"} <= reasons
    table = page("operations.md").split("Below the table is what our own program waits for:", 1)[1].split("\n\n", 2)[1]
    assert {reason for reason in reasons if f"`{reason}`" not in table} == set()
