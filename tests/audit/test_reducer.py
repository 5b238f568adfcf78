"""A reducer that tells two stories is caught before anything is open; without the digest it would not be."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cgd.audit.attacks import reducer
from cgd.secagg import attestations

if TYPE_CHECKING:
    from collections.abc import Mapping


def test_every_lie_to_one_member_is_caught() -> None:
    for found in reducer.attacks("cgd"):
        assert found.value == 1.0
        assert not found.succeeds


def test_one_wrong_total_for_all_cannot_be_caught_and_honest_sums_are_right() -> None:
    wrong, right = reducer.controls("cgd")
    assert wrong.value == right.value == 0.0
    assert wrong.succeeds
    assert wrong.must_succeed
    assert not right.must_succeed
    assert not right.succeeds
    assert right.detail.endswith("40 opened by all with the right one")


@pytest.mark.parametrize("kind", ["to one", "to one, own digests to match"])
def test_without_the_comparison_a_lie_goes_through(kind: reducer.Lie, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attack can succeed: what stops it is the digest, and nothing else."""
    monkeypatch.setattr(attestations, "check_digests", lambda *_: None)
    found = reducer.lie(kind, tries=10)
    assert found.value == 0.0
    assert found.succeeds


def test_digests_to_match_are_those_that_the_deceived_member_has(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: dict[str, bool] = {}

    def compare(me: str, _number: int, digests: Mapping[str, bytes]) -> None:
        compared[me] = digests[reducer.LIAR] == digests[me]

    monkeypatch.setattr(attestations, "check_digests", compare)
    for opening in ("mesh", "aggregator"):
        for seed in range(5):
            reducer.play("to one, own digests to match", opening, seed)
            assert compared == dict.fromkeys(reducer.MEMBERS, True)
