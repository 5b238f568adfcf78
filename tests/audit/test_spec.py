"""An audit of one's own setting: which run of a spec, what is tried, and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cgd.audit import results
from cgd.audit.examination import EXAMINED
from cgd.audit.runner import run
from cgd.audit.sources import plan_for
from cgd.audit.view import SCHEMES
from cgd.errors import InputError
from support.audits import WHEN, ProgressListener

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

SPEC = """
[common]
data = "breast-cancer"
samples = 40
hidden = [8]
steps = 4

[[run]]
label = "pooled"
method = "centralised"

[[run]]
label = "five clinics"
rows = 5

[[run]]
label = "by columns"
rows = 3
columns = 3

[[run]]
label = "a pair"
rows = 2
"""


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(SPEC)
    return path


def test_few_records_of_ones_own_setting_leak_and_the_page_can_be_made_again(spec: Path) -> None:
    plan = plan_for([spec], rounds=3)
    assert plan.source.about.startswith("five clinics: breast-cancer, split over 5 participants, of whom 2 are honest")
    assert plan.command(1) == f"cgd audit {spec} --rounds 3 --seed 1"
    assert [(each.scheme, each.attack) for each in plan.parts] == [(one, two) for one in SCHEMES for two in EXAMINED]
    outcome = run(plan.choose(["membership", "labels"]), seed=0, jobs=2, watch=ProgressListener())
    said, _ = results.content(plan.choose(["membership", "labels"]), outcome, 0, WHEN)
    assert not said["failed"]
    membership = said["attacks"][0]["findings"]
    assert {each["setting"] for each in membership} == {"2 honest, 16 records, 3 rounds"}
    by_span = {each["scheme"]: each["succeeds"] for each in membership if "span" in each["attack"]}
    assert by_span == {"plain": True, "secure": True, "dp": False, "cgd": True}


def test_another_seed_is_another_split(spec: Path) -> None:
    part = next(each for each in plan_for([spec]).parts if each.attack == "membership" and each.scheme == "cgd")
    assert part.run(0) == part.run(0)
    assert part.run(0) != part.run(1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label": "four clinics"}, "has no run 'four clinics'; it has 'pooled', 'five clinics'"),
        ({"label": "by columns"}, "the run has 3 columns"),
        ({"label": "a pair"}, "2 of 2 participants are honest"),
        ({"honest": 5}, "5 of 5 participants are honest"),
        ({"coalition": ["ada"]}, "--coalition is ada; it is for recorded runs"),
    ],
)
def test_what_cannot_be_audited_is_refused_before_the_work(
    spec: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        plan_for([spec], **options)  # type: ignore[arg-type]


def test_a_spec_without_a_run_by_cgd_and_options_without_a_spec_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[[run]]\nmethod = "centralised"\n')
    with pytest.raises(InputError, match="no run by the method cgd"):
        plan_for([path])
    with pytest.raises(InputError, match="are for a spec"):
        plan_for([], rounds=4)
