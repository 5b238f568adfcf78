"""How the paper's claims about privacy are judged by audits."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cgd import InputError
from cgd.audit import privacy_claims
from cgd.experiments import claims
from cgd.experiments.claims import CONFIRMED, NOT_CONFIRMED, NOT_RUN
from cgd.experiments.runner import ResultStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from cgd.audit.results import AttackResult, Audit
    from cgd.experiments.claims import JudgedClaim

RESULTS = Path(__file__).parents[2] / "results"
MAKE = (privacy_claims.AUDITS, privacy_claims.LEVERAGE)


@cache
def stored() -> list[Audit]:
    return privacy_claims.read_audits(RESULTS)


def changed(change: Callable[[AttackResult], AttackResult]) -> list[Audit]:
    """Return the stored audits with other results."""
    return [
        replace(
            audit,
            attacks=[replace(attack, findings=[change(each) for each in attack.findings]) for attack in audit.attacks],
        )
        for audit in stored()
    ]


def judge(
    audits: list[Audit], auc: float | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, JudgedClaim]:
    """Return the claims that results decide, by text, given audits and the AUC of membership by leverage."""
    monkeypatch.setattr(privacy_claims, "read_audits", lambda _: audits)
    if auc is not None:
        points = [
            {"records": 10, "auc": 0.9, "standard_error": 0.01},
            {"records": 20, "auc": auc, "standard_error": 0.01},
        ]
        (folder / "leverage.json").write_text(json.dumps([{"setting": "digits", "points": points}]))
    found = claims.judge(privacy_claims.claims(folder), "paper", ResultStore(folder / "paper"))
    return {each.claim.text: each for each in found if each.claim.ran and each.claim.ran[0] in MAKE}


def attacked(each: AttackResult, scheme: str) -> AttackResult:
    """Return the result of an attack that succeeds against this scheme only; several rounds are then better."""
    succeeds = each.scheme == scheme
    rounds = 30.0 if ("several" in each.attack) == (scheme == "cgd") else 20.0
    return replace(each, succeeds=succeeds, value=rounds)


def test_every_claim_can_be_confirmed_and_refuted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harmless = judge(changed(lambda each: attacked(each, "secure")), 0.53, tmp_path, monkeypatch)
    assert {text: each.verdict for text, each in harmless.items() if each.verdict != CONFIRMED} == {}
    harmful = judge(changed(lambda each: attacked(each, "cgd")), 0.531, tmp_path, monkeypatch)
    assert {text: each.verdict for text, each in harmful.items() if each.verdict != NOT_CONFIRMED} == {}
    assert len(harmful) == 9


def test_claims_are_open_without_audits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = judge([], None, tmp_path, monkeypatch)
    for each in found.values():
        assert each.verdict == NOT_RUN
        assert each.figures == f"*missing:* {each.claim.ran[0]}"


def test_attack_that_succeeds_in_half_of_the_draws_counts_as_failed() -> None:
    (one, *_) = privacy_claims.all_draws(stored(), "records", "cgd").values()
    won, lost = (replace(one.found[0], succeeds=succeeds) for succeeds in (True, False))
    assert not replace(one, found=(won, lost)).succeeds
    assert replace(one, found=(won, won, lost)).succeeds


def test_draws_are_those_of_all_audits_without_controls() -> None:
    found = privacy_claims.all_draws(stored(), "simulator", "cgd")
    assert all("the protocol as it is" in setting for setting in found)  # the controls remove protections
    assert {len(each.found) for each in found.values()} == {len(stored())}


def test_setting_that_no_audit_has_is_a_defect() -> None:
    evidence = claims.Evidence("paper", RESULTS, {})
    with pytest.raises(LookupError, match="no setting of records with 'moon'"):
        privacy_claims._select(evidence, stored(), "records", "moon")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '[{"setting": "a", "points": []}]', '[{"setting": "a", "points": 3}]']
)
def test_damaged_file_of_leverage_is_named(text: str, tmp_path: Path) -> None:
    """An empty list must not confirm a claim, either."""
    (tmp_path / "leverage.json").write_text(text)
    with pytest.raises(InputError, match="leverage.json is damaged: .*; restore it from a copy, or run `make lev"):
        claims.judge(privacy_claims.claims(tmp_path), "paper", ResultStore(tmp_path / "paper"))
