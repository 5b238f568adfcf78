"""A reducer that equivocates is detected before the sum is opened, by the digest and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cgd.audit.attacks import reducer
from cgd.secagg import agreement

if TYPE_CHECKING:
    from collections.abc import Mapping


def test_every_wrong_total_for_one_member_is_detected() -> None:
    for found in reducer.attacks("cgd"):
        assert found.value == 1.0
        assert not found.succeeds


def test_same_wrong_total_for_all_is_not_detected_and_honest_sums_are_right() -> None:
    wrong, right = reducer.controls("cgd")
    assert wrong.value == right.value == 0.0
    assert wrong.succeeds
    assert wrong.must_succeed
    assert not right.must_succeed
    assert not right.succeeds
    assert right.detail.endswith("40 were opened by all with the right one")


@pytest.mark.parametrize("lie", ["to one", "to one, own digests to match"])
def test_wrong_total_is_opened_without_the_comparison(lie: reducer.Lie, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the attack: only the comparison of digests prevents it."""
    monkeypatch.setattr(agreement, "check_digests", lambda *_: None)
    found = reducer.equivocate(lie, tries=10)
    assert found.value == 0.0
    assert found.succeeds


def test_matching_digests_are_those_of_the_deceived_member(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: dict[str, bool] = {}

    def compare(me: str, _number: int, digests: Mapping[str, bytes]) -> None:
        compared[me] = digests[reducer.ATTACKER] == digests[me]

    monkeypatch.setattr(agreement, "check_digests", compare)
    for opening in ("mesh", "aggregator"):
        for seed in range(5):
            reducer.run_sum("to one, own digests to match", opening, seed)
            assert compared == dict.fromkeys(reducer.MEMBERS, True)
