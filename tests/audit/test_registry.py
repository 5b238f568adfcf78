"""The audit on embedded data: the results that it must have, and the outcomes of its controls."""

from __future__ import annotations

import pickle
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cgd.audit import attacks, results
from cgd.audit.embedded_source import DemonstrationPart, embedded
from cgd.audit.registry import ATTACKS, get
from cgd.audit.verdicts import METRICS
from cgd.errors import InputError

if TYPE_CHECKING:
    from cgd.audit.results import AttackResult

ROOT = Path(__file__).parents[2]
PARTS = [each for each in embedded().parts if isinstance(each, DemonstrationPart)]
# The stored audits have those of the other schemes (tests/test_threat_model.py), and test_ideal_simulator.py has those
# of the simulator.
CONTROLS = [
    each
    for each in PARTS
    if each.control and (each.scheme == "cgd" or get(each.attack).control_schemes) and each.attack != "simulator"
]


@cache
def run(attack: str) -> list[AttackResult]:
    return DemonstrationPart(attack, "cgd").run()


@pytest.mark.parametrize("part", CONTROLS, ids=lambda each: each.label)
def test_control_has_the_known_outcome(part: DemonstrationPart) -> None:
    controls = part.run()
    assert controls
    for each in controls:
        assert each.control
        assert each.scheme == part.scheme
        assert each.succeeds == each.must_succeed, each
        assert each.metric in METRICS


@pytest.mark.parametrize("attack", ["gram", "membership", "records", "joint"])
def test_attack_succeeds_despite_confinement(attack: str) -> None:
    succeeding = [each for each in run(attack) if each.succeeds]
    assert succeeding
    assert not any(each.control for each in succeeding)


def test_reducer_fails_against_cgd() -> None:
    assert not any(each.succeeds for each in run("reducer"))


@pytest.mark.parametrize("attack", ["gram", "theorem3"])
def test_attack_fails_against_cgd_only_with_a_large_delta(attack: str) -> None:
    by_delta = {each.setting.partition("δ = ")[2]: each.succeeds for each in run(attack)}
    by_delta.pop("", None)
    assert by_delta == {"0.1": False, "0.02": True}


def test_every_attack_has_demonstrations_and_controls() -> None:
    for attack in ATTACKS:
        assert {each.control for each in PARTS if each.attack == attack.id} == {False, True}
    assert len({each.id for each in ATTACKS}) == len(ATTACKS)


def test_modules_are_named_by_the_ids() -> None:
    for attack in ATTACKS:
        assert attack.demonstrate.__module__ == f"{attacks.__name__}.{attack.id}"
        assert all(each.__module__ == attack.demonstrate.__module__ for each in (attack.control, *attack.on_view))


def test_metrics_of_stored_results_are_known() -> None:
    audits = [results.load(folder) for folder in (ROOT / "results" / "audit").iterdir()]
    assert audits
    assert {each.metric for audit in audits for attack in audit.attacks for each in attack.findings} <= set(METRICS)


def test_metrics_are_documented() -> None:
    _, _, page = (ROOT / "docs" / "audit.md").read_text().partition("| Metric | Meaning |\n|---|---|\n")
    table, _, _ = page.partition("\n\n")
    assert set(re.findall(r"^\| (.+?) \|", table, flags=re.MULTILINE)) == set(METRICS)


def test_parts_can_be_pickled() -> None:
    for part in PARTS:
        assert pickle.loads(pickle.dumps(part)) == part


def test_unknown_id_is_rejected() -> None:
    with pytest.raises(InputError, match="no attack 'gran'; choose one of gram, membership"):
        get("gran")
