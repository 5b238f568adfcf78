"""The audit on embedded data: what must come out of it, and that its controls do what they must."""

from __future__ import annotations

import pickle
from functools import cache

import pytest

from cgd.audit.registry import CATALOGUE, Demonstration, get, parts
from cgd.audit.view import Finding
from cgd.errors import InputError


@cache
def found(part: Demonstration) -> list[Finding]:
    [(attack, results)] = part.run().items()
    assert attack == part.attack
    return [each for each in results if isinstance(each, Finding)]


CONTROLS = [each for each in parts() if each.control]
# Under the other schemes they are in the audits that are kept (tests/test_threat_model.py), and test_simulator.py has
# those of the simulator.
TRIED = [
    each for each in CONTROLS if (each.scheme == "cgd" or get(each.attack).controlled) and each.attack != "simulator"
]


@pytest.mark.parametrize("part", TRIED, ids=lambda each: each.label)
def test_every_control_comes_out_as_it_must(part: Demonstration) -> None:
    controls = found(part)
    assert controls
    for each in controls:
        assert each.control
        assert each.scheme == part.scheme
        assert each.succeeds == each.must_succeed, each


@pytest.mark.parametrize("attack", ["gram", "membership", "records", "joint"])
def test_what_confinement_does_not_prevent(attack: str) -> None:
    succeeding = [each for each in found(Demonstration(attack, "cgd", False)) if each.succeeds]
    assert len(succeeding) >= 1
    assert not any(each.control for each in succeeding)


def test_what_holds_under_cgd() -> None:
    assert not any(each.succeeds for each in found(Demonstration("reducer", "cgd", False)))


@pytest.mark.parametrize("attack", ["gram", "theorem3"])
def test_what_holds_under_cgd_with_a_large_delta_alone(attack: str) -> None:
    by_delta = {each.setting.partition("δ = ")[2]: each.succeeds for each in found(Demonstration(attack, "cgd", False))}
    by_delta.pop("", None)
    assert by_delta == {"0.1": False, "0.02": True}


def test_every_attack_is_shown_under_some_scheme_and_has_a_control() -> None:
    for attack in CATALOGUE:
        of_it = [each for each in parts() if each.attack == attack.id]
        assert {each.control for each in of_it} == {False, True}
    assert len({each.id for each in CATALOGUE}) == len(CATALOGUE)


def test_a_part_can_be_sent_to_another_process() -> None:
    for part in parts():
        assert pickle.loads(pickle.dumps(part)) == part


def test_an_unknown_attack_is_named_with_those_there_are() -> None:
    with pytest.raises(InputError, match="no attack 'gran'; choose one of gram, membership"):
        get("gran")
