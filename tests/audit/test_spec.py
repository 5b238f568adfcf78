"""An audit of a spec: the run that is chosen, the attacks, and the settings that are rejected."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cgd.audit.registry import attacks_on_views
from cgd.audit.results import AttackResult
from cgd.audit.runner import run
from cgd.audit.sources import plan_for
from cgd.audit.view import SCHEMES
from cgd.errors import InputError
from support.audits import Progress, assemble

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


def test_few_records_of_a_spec_leak(spec: Path) -> None:
    plan = plan_for([spec], rounds=3)
    assert plan.source.about.startswith("five clinics: breast-cancer, split over 5 participants. 2 of them are honest")
    assert plan.command(1) == f"cgd audit {spec} --rounds 3 --seed 1"
    expected = [(scheme, attack.id) for scheme in SCHEMES for attack in attacks_on_views()]
    assert [(each.scheme, each.attack) for each in plan.parts] == expected
    chosen = plan.choose(["membership", "labels"])
    audit = assemble(chosen, run(chosen, seed=0, jobs=2, progress=Progress()))
    assert not audit.failed
    membership = audit.attacks[0].findings
    assert {each.setting for each in membership} == {"2 honest, 16 records, 3 rounds"}
    by_span = {each.scheme: each.succeeds for each in membership if "span" in each.attack}
    assert by_span == {scheme: scheme in ("plain", "secure", "cgd") for scheme in SCHEMES}


def test_privacy_of_the_run_is_audited_as_well(spec: Path) -> None:
    clinics = '[[run]]\ndata = "breast-cancer"\nsamples = 40\nhidden = [8]\nsteps = 4\nrows = 5\n'
    spec.write_text(f"{clinics}privacy = {{ epsilon = 3.0, delta = 1e-6, clip = 0.5 }}\n")
    plan = plan_for([spec], honest=2)
    assert list(plan.schemes) == [*SCHEMES, "dp"]
    assert plan.schemes["dp"] == "CGD, its own ε = 3"
    assert "The run has its own privacy, too: ε = 3, δ = 1e-06, t = 1, C = 0.5. 3 collude, which is more than t: " in (
        plan.source.about
    )
    assert "against them ε is 4.42." in plan.source.about
    part = next(each for each in plan.parts if each.scheme == "dp" and each.attack == "membership")
    found = part.run(0)
    assert {each.scheme for each in found} == {"dp"}
    assert all(isinstance(each, AttackResult) and each.allowed is not None for each in found)
    fewer = plan_for([spec], honest=4)
    assert fewer.source.about.endswith("t = 1, C = 0.5.")


def test_other_seed_gives_another_split(spec: Path) -> None:
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
def test_unsuitable_run_is_rejected_before_the_work(spec: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        plan_for([spec], **options)  # type: ignore[arg-type]


def test_spec_without_a_cgd_run_and_options_without_a_spec_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[[run]]\nmethod = "centralised"\n')
    with pytest.raises(InputError, match="no run with the method cgd"):
        plan_for([path])
    with pytest.raises(InputError, match="are for a spec"):
        plan_for([], rounds=4)
