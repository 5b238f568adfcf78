"""Verdicts on the results of an audit, for the table and the page.

A result *leaks* if the attack succeeded, by the attack's own rule, and otherwise *holds*; an attack that is meant to be
detected is *caught* or not. A control is a setting with a known outcome: mostly the attack must fail; where a
protection was removed, it must succeed. If the outcome is another one, the control failed, and the results of the
attack are not reliable. An attack counts as successful against a scheme if it succeeded in any setting.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from cgd.audit.differences import succeeds_clearly
from cgd.audit.view import EPSILONS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from cgd.audit.results import AttackFindings, AttackResult, Audit

Tone = Literal["bad", "good", "wrong", "none"]

_SHARE, _PLAIN, _DECIBEL = "share", "plain", "decibel"
METRICS: dict[str, tuple[str, str]] = {
    "relative error": (_PLAIN, "the relative error of the guess; 0 is exact"),
    "AUC": (
        _PLAIN,
        "the probability that a record that was used ranks above one that was not; 1 is certain, 0.5 is chance",
    ),
    "records recovered": (_SHARE, "the fraction of the others’ records that were recovered"),
    "mean PSNR, dB": (
        _DECIBEL,
        "the similarity of recovered and real records; from about 20 on they can be recognised",
    ),
    "labels wrong": (_SHARE, "the fraction of the others’ labels that were guessed wrongly; 0 is exact"),
    "lies caught": (_SHARE, "the fraction of wrong totals that every honest member detected before the sum was opened"),
    "relative error of z₂": (
        _PLAIN,
        "the relative difference of the opened sum and the gradient at a known model; 0 is equal",
    ),
    "lower bound of ε": (_PLAIN, "of the ε that the training really has; above the claimed one, it proves a defect"),
    "largest gap between distributions": (
        _PLAIN,
        "between real views and views that a simulator generates without the data",
    ),
}
"""The format and the meaning of each metric."""
CAUGHT = "lies caught"
"""The metric of attacks that are meant to be detected."""
FAILS, SUCCEEDS = "fails", "succeeds"
"""The verdicts on controls with the known outcome."""
CONTROL_FAILED = "CONTROL FAILED"
UNDECIDED = "too few"
"""The verdict on a value above chance with too few records to be sure."""
NOT_MEASURED = "not measured"
"""The verdict where an attack does not apply."""
APPLY, TOO_FEW = "apply to this data or model", "too few records to judge"
MAX_NAMED = 3  # successful attacks in the summary line
SHORT: dict[str, str] = {
    "plain": "in the open",
    "secure": "secure sums",
    "cgd": "CGD",
    **{scheme: f"ε = {epsilon:g}" for scheme, epsilon in EPSILONS.items()},
    "dp": "own ε",
}
"""Short names of the schemes."""


@dataclass(frozen=True)
class Verdict:
    """The verdict on a result.

    Attributes:
        word: the verdict.
        tone: its colour.
        value: the measured value, formatted.
        chance: the value of guessing, formatted.
        allowed: the largest value that ε allows, formatted; empty if there is none.
        result: the result.
    """

    word: str
    tone: Tone
    value: str
    chance: str
    allowed: str
    result: AttackResult = field(repr=False)

    @property
    def figures(self) -> str:
        """The value, and chance in brackets."""
        return f"{self.value} ({self.chance})"


@dataclass
class Row:
    """One setting of an attack against all schemes.

    Attributes:
        variant: the variant of the attack, if it has several: its name without the words that all have in common.
        setting: the setting in a few words.
        metric: the name of the measured quantity.
        cells: the verdicts by scheme.
    """

    variant: str
    setting: str
    metric: str
    cells: dict[str, Verdict] = field(default_factory=dict)


@dataclass(frozen=True)
class VerdictCounts:
    """The attacks on a scheme, by their outcome.

    Attributes:
        leaks: those that succeeded in a setting.
        holds: those that succeeded in none.
        undecided: those with too few records to be sure.
        inapplicable: those that cannot be tried on this data or model.
        unfinished: those that ended with an error, or were not run.
    """

    leaks: list[AttackFindings] = field(default_factory=list)
    holds: list[AttackFindings] = field(default_factory=list)
    undecided: list[AttackFindings] = field(default_factory=list)
    inapplicable: list[AttackFindings] = field(default_factory=list)
    unfinished: list[AttackFindings] = field(default_factory=list)

    @property
    def measured(self) -> int:
        """The number of those with a decided result."""
        return len(self.leaks) + len(self.holds)

    @property
    def planned(self) -> int:
        """The number of all."""
        return self.measured + len(self.undecided) + len(self.inapplicable) + len(self.unfinished)


def verdict(result: AttackResult) -> Verdict:
    """Return the verdict on a result."""
    word: str
    tone: Tone
    if result.control:
        expected = SUCCEEDS if result.must_succeed else FAILS
        word, tone = (expected, "good") if result.succeeds == result.must_succeed else (CONTROL_FAILED, "wrong")
    elif result.metric == CAUGHT:
        word, tone = ("NOT CAUGHT", "bad") if result.succeeds else ("caught", "good")
    elif result.undecided:
        word, tone = UNDECIDED, "none"
    else:
        word, tone = ("leaks", "bad") if result.succeeds else ("holds", "good")
    value, chance = (format_value(each, result.metric) for each in (result.value, result.chance))
    allowed = "" if result.allowed is None else format_value(result.allowed, result.metric)
    return Verdict(word, tone, value, chance, allowed, result)


def format_value(value: float, metric: str) -> str:
    """Return a value in at most seven characters."""
    if not math.isfinite(value):
        return "–" if math.isnan(value) else "∞" if value > 0 else "−∞"
    kind = METRICS.get(metric, (_PLAIN, ""))[0]
    if kind == _SHARE:
        percent = 100 * value
        return f"{percent:.1f} %" if 0 < percent < 10 and round(percent, 1) != round(percent) else f"{percent:.0f} %"
    if kind == _DECIBEL:
        return f"{value:.1f}".replace("-", "−")
    size = abs(value)
    if 0 < size < 1e-3 or size >= 1e5:
        digits = 1 if 1e-9 <= size < 1e10 else 0  # no decimal beside a long exponent
        base, power = f"{value:.{digits}e}".split("e")
        return f"{base}e{int(power)}".replace("-", "−")
    return (f"{value:.3f}" if 0 < size < 10 else f"{value:.4g}").replace("-", "−")


def rows(attack: AttackFindings, *, control: bool = False) -> list[Row]:
    """Return the results of an attack, or its controls, with a row per setting."""
    results = [each for each in attack.findings if each.control == control]
    variants = distinct_parts(dict.fromkeys(each.attack for each in results))
    found: list[Row] = []
    for each in results:
        key = (variants[each.attack], each.setting, each.metric)
        same = (row for row in found if (row.variant, row.setting, row.metric) == key)
        row = next((row for row in same if each.scheme not in row.cells), None)
        if row is None:
            row = Row(*key)
            found.append(row)
        row.cells[each.scheme] = verdict(each)
    order = list(variants.values())
    return sorted(found, key=lambda row: order.index(row.variant))


def distinct_parts(names: Iterable[str]) -> dict[str, str]:
    """Return each name without the words that all names begin or end with.

    >>> distinct_parts(["XᵀX of a regression", "Xᵀy of a regression"])
    {'XᵀX of a regression': 'XᵀX', 'Xᵀy of a regression': 'Xᵀy'}
    >>> distinct_parts(["inversion"])
    {'inversion': ''}
    """
    words = {name: name.split() for name in names}
    split = list(words.values())
    shortest = min(map(len, split), default=0)
    begin = next((k for k in range(shortest) if len({each[k] for each in split}) > 1), shortest)
    rest = shortest - begin
    end = next((k for k in range(rest) if len({each[-1 - k] for each in split}) > 1), rest)
    return {name: " ".join(each[begin : len(each) - end]).strip(" ,;:") for name, each in words.items()}


def count_verdicts(audit: Audit, scheme: str) -> VerdictCounts:
    """Return the attacks on a scheme, by their outcome."""
    counts = VerdictCounts()
    for attack in audit.attacks:
        own = [each for each in attack.findings if each.scheme == scheme and not each.control]
        if any(each.succeeds for each in own):
            counts.leaks.append(attack)
        elif any(each.undecided for each in own):  # one undecided method leaves the attack undecided
            counts.undecided.append(attack)
        elif own:
            counts.holds.append(attack)
        elif (why := unmeasured(audit, attack).get(scheme)) is not None:
            (counts.inapplicable if why == NOT_MEASURED else counts.unfinished).append(attack)
    return counts


def distance(result: AttackResult) -> float:
    """Return the distance of a result from chance."""
    return abs(result.value - result.chance)


def worst(verdicts: list[Verdict]) -> Verdict:
    """Return the verdict that is furthest from chance, of those with the metric of the first."""
    metric = verdicts[0].result.metric
    return max((each for each in verdicts if each.result.metric == metric), key=lambda each: distance(each.result))


def unmeasured(audit: Audit, attack: AttackFindings) -> dict[str, str]:
    """Return why an attack was not measured, in a word or two by scheme; nothing where it has a result."""
    reasons: dict[str, str] = {}
    for parts, word in ((audit.failed, "failed"), (audit.unfinished, "not run")):
        reasons |= {each.scheme: word for each in parts if each.attack == attack.id and not each.control}
    reasons |= {each.scheme: NOT_MEASURED for each in attack.inapplicable}
    measured = {each.scheme for each in attack.findings if not each.control}
    return {scheme: word for scheme, word in reasons.items() if scheme not in measured}


@dataclass(frozen=True)
class Limitation:
    """A reason why an attack could not be measured, or only in part.

    Attributes:
        attack: the attack.
        schemes: the schemes that it concerns.
        why: the reason.
        partly: true if the attack has a result against these schemes by another method.
    """

    attack: AttackFindings
    schemes: list[str]
    why: str
    partly: bool


def limitations(audit: Audit) -> list[Limitation]:
    """Return the reasons why attacks do not apply, each once: first of those without a result."""
    found: dict[tuple[str, str, bool], Limitation] = {}
    for attack in audit.attacks:
        measured = {each.scheme for each in attack.findings if not each.control}
        for each in attack.inapplicable:
            partly = each.scheme in measured
            one = found.setdefault((attack.id, each.why, partly), Limitation(attack, [], each.why, partly))
            if each.scheme not in one.schemes:
                one.schemes.append(each.scheme)
    return sorted(found.values(), key=lambda each: each.partly)


def subject(audit: Audit) -> str:
    """Return the scheme that the audit is about: CGD, if it was attacked; for a table, as its federation trains."""
    if audit.source.kind == "table" and "dp" in audit.schemes:
        return "dp"
    return "cgd" if "cgd" in audit.schemes else next(iter(audit.schemes), "cgd")


def scheme_name(audit: Audit, scheme: str) -> str:
    """Return the name of a scheme for use in a sentence."""
    return audit.schemes.get(scheme, scheme).replace(", ", " with ")


def controls(audit: Audit) -> list[tuple[AttackFindings, Verdict]]:
    """Return all controls with their attacks."""
    return [(attack, verdict(each)) for attack in audit.attacks for each in attack.findings if each.control]


def failed_controls(audit: Audit) -> list[tuple[AttackFindings, Verdict]]:
    """Return the controls with a wrong outcome; other results of the same attacks are not reliable."""
    return [(attack, each) for attack, each in controls(audit) if each.tone == "wrong"]


def summary_line(audit: Audit) -> str:
    """Return the result in a line: "9 of 12 attacks succeed against CGD; all 14 controls passed".

    A few attacks that succeed are named, because their names have the condition, such as a member that leaves.
    """
    scheme = subject(audit)
    counts, checked, failed = count_verdicts(audit, scheme), controls(audit), failed_controls(audit)
    line = f"nothing was measured against {scheme_name(audit, scheme)}"
    if counts.measured:
        succeed = _plural(counts.planned, "attack succeeds", "attacks succeed")
        line = f"{len(counts.leaks)} of {counts.planned} {succeed} against {scheme_name(audit, scheme)}"
    if 0 < len(counts.leaks) <= MAX_NAMED:
        line += f" ({_titles(counts.leaks)})"
    if counts.planned > counts.measured:
        others = (
            (counts.holds, "does not succeed", "do not succeed"),
            (counts.inapplicable, f"does not {APPLY}", f"do not {APPLY}"),
            (counts.undecided, f"has {TOO_FEW}", f"have {TOO_FEW}"),
            (counts.unfinished, "did not finish", "did not finish"),
        )
        line += "".join(f", {len(each)} {_plural(len(each), one, many)}" for each, one, many in others if each)
    if failed:
        line += f"; {len(failed)} of {len(checked)} {_plural(len(checked), 'control')} FAILED"
    elif checked:
        line += f"; all {len(checked)} controls passed" if len(checked) > 1 else "; the control passed"
    return line


def summary(audit: Audit) -> list[tuple[str, str]]:
    """Return the result for a privacy officer, as sentences in two parts, the first a heading."""
    scheme = subject(audit)
    counts, name = count_verdicts(audit, scheme), scheme_name(audit, scheme)
    sentences = []
    if not counts.measured:
        sentences.append(("Nothing", f"was measured against {name}."))
    outcomes = {
        f"These attacks succeed against {name}:": counts.leaks,
        f"These attacks do not succeed against {name}:": counts.holds,
        f"These do not {APPLY}, so nothing is known:": counts.inapplicable,
        f"These have {TOO_FEW}:": counts.undecided,
        "These did not finish, so nothing is known:": counts.unfinished,
    }
    sentences += [(heading, f"{_titles(each)}.") for heading, each in outcomes.items() if each]
    sentences += [each for other in audit.schemes if other != scheme for each in _compare(audit, scheme, other)]
    return sentences + _reliability(audit)


def _compare(audit: Audit, scheme: str, other: str) -> Iterator[tuple[str, str]]:
    """Compare two schemes by the attacks that were measured against both; differences within chance do not count."""
    ours, theirs = count_verdicts(audit, scheme), count_verdicts(audit, other)
    own = {each.id for each in (*ours.leaks, *ours.holds)}
    both = [each for each in (*theirs.leaks, *theirs.holds) if each.id in own]
    if not both:
        return
    parts, unclear = [], []
    for one, leaks, another, others in ((other, theirs, scheme, ours), (scheme, ours, other, theirs)):
        only = [each for each in both if each in leaks.leaks and each not in others.leaks]
        clear = [each for each in only if succeeds_clearly(each, one, another)]
        unclear += [each for each in only if each not in clear]
        if clear:
            succeed = _plural(len(clear), "succeeds", "succeed")
            parts.append(f"{len(clear)} {succeed} against {scheme_name(audit, one)} only ({_titles(clear)})")
    if unclear:
        verdicts = _plural(len(unclear), "has another verdict", "have other verdicts")
        parts.append(f"{len(unclear)} {verdicts}, but the results do not differ clearly ({_titles(unclear)})")
    measured = f"of {len(both)} {_plural(len(both), 'attack')} measured against both, "
    yield (
        f"Compared with {scheme_name(audit, other)}:",
        f"{measured}{'; '.join(parts) or 'all have the same outcome'}.",
    )


def _reliability(audit: Audit) -> list[tuple[str, str]]:
    """Return sentences about controls, errors and interruptions."""
    sentences = []
    checked, failed = controls(audit), failed_controls(audit)
    if failed:
        names = _titles(list({attack.id: attack for attack, _ in failed}.values()))
        sentences.append(("Not reliable:", f"{names}. {len(failed)} of {len(checked)} controls failed."))
    elif checked:
        count = f"{len(checked)} {_plural(len(checked), 'control')}"
        sentences.append(("Checked", f"in settings with a known outcome: {count}, all passed."))
    errors, missing = len(audit.failed), len(audit.unfinished)
    if errors:
        sentences.append(("Failed:", f"{errors} {_plural(errors, 'part')} ended with an error, and measured nothing."))
    if missing:
        sentences.append(("Interrupted:", f"{missing} {_plural(missing, 'part')} did not finish."))
    return sentences


def _titles(attacks: list[AttackFindings]) -> str:
    return "; ".join(each.title for each in attacks)


def _plural(number: int, one: str, many: str = "") -> str:
    return one if number == 1 else many or f"{one}s"
