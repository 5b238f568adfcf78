"""Whether an attack's results against two schemes differ clearly, or only as chance makes them differ.

A verdict has a threshold, so two results that are nearly equal can have different verdicts. A privacy officer must not
read from them that one scheme is better.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cgd.audit.results import AttackFindings, AttackResult

MIN_DEVIATIONS = 3.0
"""The smallest clear difference, in standard deviations of the difference."""
MIN_PART = 0.5
"""Where no deviation is known: the smallest clear difference, as a part of the success's distance from chance."""


def succeeds_clearly(attack: AttackFindings, scheme: str, other: str) -> bool:
    """Return whether an attack obtains clearly more against a scheme than against another one.

    One of its successes must differ clearly from the result in the same setting against the other scheme, if there is
    one.
    """
    successes = [each for each in _results(attack, scheme) if each.succeeds]
    return any(
        all(_differ(each, same) for same in _results(attack, other) if _setting(each) == _setting(same))
        for each in successes
    )


def _results(attack: AttackFindings, scheme: str) -> Iterable[AttackResult]:
    return (each for each in attack.findings if each.scheme == scheme and not each.control)


def _setting(result: AttackResult) -> tuple[str, str, str]:
    return result.attack, result.setting, result.metric


def _differ(success: AttackResult, other: AttackResult) -> bool:
    difference = abs(success.value - other.value)
    if not math.isfinite(difference):
        return success.value != other.value
    if success.deviation is not None and other.deviation is not None:
        return difference > MIN_DEVIATIONS * math.hypot(success.deviation, other.deviation)
    return difference >= MIN_PART * abs(success.value - success.chance)
