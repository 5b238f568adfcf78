"""What the findings of an audit come to, in words: for the table and for the page, so that both say the same.

A finding *leaks* if the attack succeeded, by the attack's own rule, and otherwise *holds*. An attack that is about
being noticed is *caught*, or not. A control is a setting in which it is known what must come out: mostly that the
attack *fails*; where a protection was taken away, that it *succeeds*. If it comes out otherwise, the audit is not to be
trusted there. An attack counts as successful against a scheme if it succeeded in any setting.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Audit = dict[str, Any]
Tone = Literal["bad", "good", "loud", "none"]

# Kept by metric: how it is written, and what a reader has to know about it.
_SHARE, _PLAIN, _DECIBEL = "share", "plain", "decibel"
METRICS: dict[str, tuple[str, str]] = {
    "relative error": (_PLAIN, "how far the guess is from the truth; 0 is exact"),
    "AUC": (_PLAIN, "how often a record that was used ranks above one that was not; 1 is always, 0.5 a coin"),
    "records recovered": (_SHARE, "the part of the others’ records that came out"),
    "mean PSNR, dB": (
        _DECIBEL,
        "how like the real records the recovered ones are; from about 20 on one recognises them",
    ),
    "labels wrong": (_SHARE, "the part of the others’ labels that was guessed wrongly; 0 is exact"),
    "lies caught": (_SHARE, "the part of the lies that every honest member noticed before anything was opened"),
    "relative error of z₂": (_PLAIN, "how far the opened sum is from the gradient at a known model; 0 is the same"),
    "largest gap between distributions": (_PLAIN, "between what is seen and what a simulator without the data makes"),
}
CAUGHT = "lies caught"
"""The metric of attacks that are about being noticed."""
FAILS, SUCCEEDS = "fails", "succeeds"
"""The verdicts on controls that come out as they must."""
UNDECIDED = "too few"
"""What looks better than guessing, of too few records to tell."""
NOT_MEASURED = "not measured"
"""Where an attack cannot be tried."""
SHORT = {"plain": "in the open", "secure": "secure sums", "dp": "diff. privacy", "cgd": "CGD"}


@dataclass(frozen=True)
class Verdict:
    """What a finding comes to.

    Attributes:
        word: the verdict.
        tone: how bad it is.
        value: what was measured, as written.
        chance: what guessing gives, as written.
        finding: as audit.json has it.
    """

    word: str
    tone: Tone
    value: str
    chance: str
    finding: dict[str, Any] = field(repr=False)

    @property
    def figures(self) -> str:
        """The value, and what chance would give."""
        return f"{self.value} ({self.chance})"


@dataclass
class Row:
    """The same setting of an attack against every scheme.

    Attributes:
        variant: which form of the attack, if it has several: what sets its name apart from the others'.
        setting: in a few words.
        metric: what was measured.
        cells: by scheme.
    """

    variant: str
    setting: str
    metric: str
    cells: dict[str, Verdict] = field(default_factory=dict)


@dataclass(frozen=True)
class VerdictCounts:
    """How many attacks succeed against a scheme.

    Attributes:
        leaks: the attacks that did in some setting.
        holds: those that did in none.
    """

    leaks: list[dict[str, Any]]
    holds: list[dict[str, Any]]

    @property
    def tried(self) -> int:
        """How many were tried."""
        return len(self.leaks) + len(self.holds)


def verdict(finding: dict[str, Any]) -> Verdict:
    """The verdict on a finding."""
    succeeds = finding["succeeds"]
    word: str
    tone: Tone
    if finding["control"]:
        right, wrong = (SUCCEEDS, "FAILS") if finding["must_succeed"] else (FAILS, "DOES NOT FAIL")
        word, tone = (right, "good") if succeeds == finding["must_succeed"] else (wrong, "loud")
    elif finding["metric"] == CAUGHT:
        word, tone = ("NOT CAUGHT", "bad") if succeeds else ("caught", "good")
    elif finding["undecided"]:
        word, tone = UNDECIDED, "none"
    else:
        word, tone = ("leaks", "bad") if succeeds else ("holds", "good")
    value, chance = (written(finding[name], finding["metric"]) for name in ("value", "chance"))
    return Verdict(word, tone, value, chance, finding)


def written(value: float, metric: str) -> str:
    """A figure in at most seven characters."""
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
        digits = 1 if 1e-9 <= size < 1e10 else 0  # a long exponent takes the place of a decimal
        base, power = f"{value:.{digits}e}".split("e")
        return f"{base}e{int(power)}".replace("-", "−")
    return (f"{value:.3f}" if 0 < size < 10 else f"{value:.4g}").replace("-", "−")


def rows(attack: dict[str, Any], *, control: bool = False) -> list[Row]:
    """The findings of an attack, those of the same setting beside each other."""
    findings = [each for each in attack["findings"] if each["control"] == control]
    variants = apart(dict.fromkeys(each["attack"] for each in findings))
    found: list[Row] = []
    for each in findings:
        variant = variants[each["attack"]]
        wanted = (variant, each["setting"], each["metric"])
        fits = (row for row in found if (row.variant, row.setting, row.metric) == wanted)
        row = next((row for row in fits if each["scheme"] not in row.cells), None)
        if row is None:
            row = Row(*wanted)
            found.append(row)
        row.cells[each["scheme"]] = verdict(each)
    order = list(variants.values())
    return sorted(found, key=lambda row: order.index(row.variant))


def apart(names: Iterable[str]) -> dict[str, str]:
    """What sets each name apart from the others: without the words that all begin or end with.

    >>> apart(["XᵀX of a regression", "Xᵀy of a regression"])
    {'XᵀX of a regression': 'XᵀX', 'Xᵀy of a regression': 'Xᵀy'}
    >>> apart(["inversion"])
    {'inversion': ''}
    """
    words = {name: name.split() for name in names}
    split = list(words.values())
    shortest = min(map(len, split), default=0)
    begin = next((k for k in range(shortest) if len({each[k] for each in split}) > 1), shortest)
    least = shortest - begin
    end = next((k for k in range(least) if len({each[-1 - k] for each in split}) > 1), least)
    return {name: " ".join(each[begin : len(each) - end]).strip(" ,;:") for name, each in words.items()}


def tally(audit: Audit, scheme: str) -> VerdictCounts:
    """Which attacks succeed against a scheme."""
    leaks: list[dict[str, Any]] = []
    holds: list[dict[str, Any]] = []
    for attack in audit["attacks"]:
        tried = _decided(attack, scheme)
        if tried:
            (leaks if any(each["succeeds"] for each in tried) else holds).append(attack)
    return VerdictCounts(leaks, holds)


def worst(found: list[Verdict]) -> Verdict:
    """The one that is furthest from chance, of those that were measured like the first."""
    alike = [each for each in found if each.finding["metric"] == found[0].finding["metric"]]
    return max(alike, key=lambda each: abs(each.finding["value"] - each.finding["chance"]))


def _decided(attack: dict[str, Any], scheme: str) -> list[dict[str, Any]]:
    own = [each for each in attack["findings"] if each["scheme"] == scheme and not each["control"]]
    return [each for each in own if not each["undecided"]]


def unmeasured(audit: Audit, scheme: str) -> list[dict[str, Any]]:
    """The attacks that were to be tried against a scheme, and of which nothing is known."""
    found = tally(audit, scheme)
    tried = [each["id"] for each in (*found.leaks, *found.holds)]
    left = [each for each in audit["attacks"] if each["id"] not in tried]
    return [
        attack
        for attack in left
        if scheme in spoilt(audit, attack)
        or any(each["scheme"] == scheme and each["undecided"] for each in attack["findings"])
    ]


def subject(audit: Audit) -> str:
    """The scheme that it is about: CGD, if it was tried."""
    return "cgd" if "cgd" in audit["schemes"] else next(iter(audit["schemes"]), "cgd")


def called(audit: Audit, scheme: str) -> str:
    """A scheme's name in a sentence."""
    return str(audit["schemes"].get(scheme, scheme)).replace(", ", " with ")


def controls(audit: Audit) -> list[tuple[dict[str, Any], Verdict]]:
    """All controls, each with its attack."""
    found = [(attack, each) for attack in audit["attacks"] for each in attack["findings"]]
    return [(attack, verdict(each)) for attack, each in found if each["control"]]


def loud(audit: Audit) -> list[tuple[dict[str, Any], Verdict]]:
    """Controls that came out wrong: what the same attack finds elsewhere is not to be trusted."""
    return [(attack, each) for attack, each in controls(audit) if each.tone == "loud"]


def spoilt(audit: Audit, attack: dict[str, Any]) -> dict[str, str]:
    """Why there is nothing, or not everything, of an attack against a scheme, in a word or two."""
    why: dict[str, str] = {}
    for name, word in (("failed", "failed"), ("unfinished", "not run")):
        why |= {each["scheme"]: word for each in audit[name] if each["attack"] == attack["id"] and not each["control"]}
    return why | {each["scheme"]: NOT_MEASURED for each in attack["inapplicable"]}


def count(audit: Audit) -> str:
    """The result in a line: "9 of 12 attacks succeed against CGD; all 14 controls come out as they must"."""
    about = subject(audit)
    found, checked, wrong = tally(audit, about), controls(audit), loud(audit)
    if not found.tried:
        return f"nothing was measured against {called(audit, about)}"
    attacks = _plural(found.tried, "attack succeeds", "attacks succeed")
    told = f"{len(found.leaks)} of {found.tried} {attacks} against {called(audit, about)}"
    left = unmeasured(audit, about)
    if left:
        told += f", {len(left)} could not be measured"
    if wrong:
        those = _plural(len(checked), "control comes", "controls come")
        told += f"; {len(wrong)} of {len(checked)} {those} out OTHERWISE THAN THEY MUST"
    elif checked:
        every = f"all {len(checked)} controls come" if len(checked) > 1 else "the one control comes"
        told += f"; {every} out as {_plural(len(checked), 'it', 'they')} must"
    return told


def answer(audit: Audit) -> list[tuple[str, str]]:
    """The result for a privacy officer, from what was found: sentences in two halves, the first a heading."""
    about = subject(audit)
    found, name = tally(audit, about), called(audit, about)
    told = []
    if found.leaks:
        told.append((f"These succeed against {name}:", f"{_titles(found.leaks)}."))
    if found.holds:
        told.append((f"These do not succeed against {name}:", f"{_titles(found.holds)}."))
    if not found.tried:
        told.append(("Nothing", f"was measured against {name}."))
    if left := unmeasured(audit, about):
        told.append(("Not measured, which is no comfort:", f"{_titles(left)}."))
    told += [each for other in audit["schemes"] if other != about for each in _compared(audit, about, other)]
    return told + _trust(audit)


def _compared(audit: Audit, about: str, other: str) -> Iterator[tuple[str, str]]:
    """Two schemes side by side, on the attacks that were tried against both."""
    ours, theirs = tally(audit, about), tally(audit, other)
    own = {each["id"] for each in (*ours.leaks, *ours.holds)}
    both = [each for each in (*theirs.leaks, *theirs.holds) if each["id"] in own]
    if not both:
        return
    bad, worse = ({each["id"] for each in side.leaks} for side in (ours, theirs))
    differ = {
        called(audit, other): [each for each in both if each["id"] in worse - bad],
        called(audit, about): [each for each in both if each["id"] in bad - worse],
    }
    parts = [
        f"{len(those)} {_plural(len(those), 'gets', 'get')} through against {name} alone ({_titles(those)})"
        for name, those in differ.items()
        if those
    ]
    tried = f"of {len(both)} {_plural(len(both), 'attack')} tried against both, "
    yield f"Beside {called(audit, other)}:", f"{tried}{'; '.join(parts) or 'all end the same way'}."


def _trust(audit: Audit) -> list[tuple[str, str]]:
    """How far all this can be relied on."""
    told = []
    checked, wrong = controls(audit), loud(audit)
    if wrong:
        names = _titles(list({attack["id"]: attack for attack, _ in wrong}.values()))
        told.append(
            ("Not to be relied on:", f"{names}. {len(wrong)} of {len(checked)} controls came out as they must not.")
        )
    elif checked:
        many = f"{len(checked)} {_plural(len(checked), 'control')}"
        told.append(("Tested", f"in settings where it is known what must come out: {many}, none of them wrong."))
    broken, left = len(audit["failed"]), len(audit["unfinished"])
    if broken:
        told.append(("Failed:", f"{broken} {_plural(broken, 'part')} ended with an error; nothing is known there."))
    if left:
        told.append(("Interrupted:", f"{left} {_plural(left, 'part')} had not been finished."))
    return told


def _titles(attacks: list[dict[str, Any]]) -> str:
    return "; ".join(each["title"] for each in attacks)


def _plural(number: int, one: str, many: str = "") -> str:
    return one if number == 1 else many or f"{one}s"
