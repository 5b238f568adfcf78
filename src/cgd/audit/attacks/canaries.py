"""Canaries: is the claimed ε true? Measured on the path of the product, not on a simulated view.

`cgd.audit.canaries` trains on fake records, each of which is among the records or not, by a coin, and guesses the coins
from the opened totals. The rates of wrong guesses give a lower bound of ε. Where a protection is removed, the bound
must be above the claim. The noise is the product's own, and so another one in every run, whatever the seed is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cgd.audit.canaries import CanaryAudit, audit_canaries
from cgd.audit.results import AttackResult
from cgd.audit.view import EPSILONS

if TYPE_CHECKING:
    from cgd.audit.view import Scheme

CONFIDENCE = 0.9999
CANARIES = 1000
RUNS = 20
# The trainings after which it is certain enough that one forgets more than is allowed. With ε = 0.5 it would take
# hundreds of them.
FORGETFUL_RUNS: dict[Scheme, int] = {"dp8": 10, "dp2": 50}


def attacks(scheme: Scheme, seed: int = 0) -> list[AttackResult]:
    """Return the lower bound of ε."""
    audit = audit_canaries(epsilon=EPSILONS[scheme], canaries=CANARIES, runs=RUNS, seed=seed, confidence=CONFIDENCE)
    return [_result(audit, scheme, f"5 members, t = 1, {RUNS * CANARIES:,} canaries")]


def controls(scheme: Scheme, seed: int = 0) -> list[AttackResult]:
    """Return the lower bounds without noise, and if one member more than t leaves out its noise."""
    epsilon = EPSILONS[scheme]
    silent = audit_canaries(epsilon=epsilon, forgetful=5, runs=2, seed=seed, confidence=CONFIDENCE)
    results = [_result(silent, scheme, "5 members, t = 1, without noise", must_succeed=True)]
    if scheme in FORGETFUL_RUNS:
        runs = FORGETFUL_RUNS[scheme]
        less = audit_canaries(epsilon=epsilon, members=3, forgetful=2, runs=runs, seed=seed, confidence=CONFIDENCE)
        results.append(_result(less, scheme, "3 members, t = 1, two without noise", must_succeed=True))
    return results


def _result(audit: CanaryAudit, scheme: Scheme, setting: str, *, must_succeed: bool = False) -> AttackResult:
    """Return the lower bound; guessing would show 0. The attack succeeds if it is above the claim."""
    detail = (
        f"{audit.missed} of {audit.inside} canaries were missed, {audit.alarms} of {audit.outside} others were taken "
        f"for canaries; the bound of Steinke, Nasr and Jagielski from {audit.guesses} guesses is "
        f"{audit.epsilon_lower_one_run:.2f}"
    )
    return AttackResult(
        "lower bound of ε",
        scheme,
        "lower bound of ε",
        audit.epsilon_lower,
        0.0,
        succeeds=audit.epsilon_lower > audit.epsilon,
        setting=setting,
        detail=detail,
        must_succeed=must_succeed,
        allowed=audit.epsilon,
    )
