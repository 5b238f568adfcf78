"""An audit as a page for a privacy officer: what the template is given.

Whatever comes from the file stays text: the template escapes it, and the page's content security policy allows no
script and no address. Pictures are in the page itself.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from cgd.audit import verdicts
from cgd.reporting.training_report import compact, templates

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cgd.audit.verdicts import Audit, Row, Verdict


@dataclass(frozen=True)
class AttackSummary:
    """An attack against a scheme, all its settings taken together.

    Attributes:
        verdict: on the worst setting of those in which it succeeds, or of all.
        settings: in how many settings it was tried.
        leaks: in how many of them it succeeds.
    """

    verdict: Verdict
    settings: int
    leaks: int

    @property
    def often(self) -> str:
        """In how many settings, if there are several and they differ."""
        if self.settings == 1 or not self.leaks:
            return ""
        if self.leaks < self.settings:
            return f"in {self.leaks} of {self.settings} settings"
        return "in both settings" if self.settings == 2 else f"in all {self.settings} settings"


@dataclass(frozen=True)
class RecoveredImages:
    """Pictures of one finding.

    Attributes:
        verdict: on it.
        variant: which form of the attack.
        pictures: captions and addresses that hold the pictures themselves; the real ones first.
    """

    verdict: Verdict
    variant: str
    pictures: list[tuple[str, str]]


@dataclass(frozen=True)
class AttackSection:
    """An attack on the page.

    Attributes:
        attack: as audit.json has it.
        glances: by scheme.
        rows: all settings.
        controls: the same for those in which it is known what must come out.
        metrics: what each metric means.
        exhibits: pictures, of the setting of each variant in which most comes out, the last of several.
        more: those of the other settings.
        checks: those of controls.
        spoilt: schemes against which it could not be measured, and a word why.
    """

    attack: dict[str, Any]
    glances: dict[str, AttackSummary]
    rows: list[Row]
    controls: list[Row]
    metrics: list[tuple[str, str]]
    exhibits: list[RecoveredImages]
    more: list[RecoveredImages]
    checks: list[RecoveredImages]
    spoilt: dict[str, str]

    @property
    def details(self) -> list[tuple[Row, str, Verdict]]:
        """Findings with more to say."""
        cells = [(row, scheme, each) for row in self.rows for scheme, each in row.cells.items()]
        return [each for each in cells if each[2].finding["detail"]]


def render(audit: Audit, pictures: Mapping[str, bytes]) -> str:
    """The page of an audit, as `results.load` gives it, with the pictures that it names, by path."""
    about = verdicts.subject(audit)
    chapters = [_chapter(audit, attack, pictures) for attack in audit["attacks"]]
    page = templates("cgd.audit").get_template("audit.html.jinja")
    text = page.render(
        audit=audit,
        about=about,
        name=verdicts.called(audit, about),
        tallies={scheme: verdicts.tally(audit, scheme) for scheme in _subject_first(audit)},
        short=verdicts.SHORT,
        answer=verdicts.answer(audit),
        chapters=chapters,
        grouped=_grouped,
        controls=verdicts.controls(audit),
        loud=verdicts.loud(audit),
        inapplicable=[(attack, each) for attack in audit["attacks"] for each in attack["inapplicable"]],
        confidential=audit["source"]["kind"] != "embedded",
    )
    return compact(text)


def _subject_first(audit: Audit) -> list[str]:
    return sorted(audit["schemes"], key=lambda scheme: scheme != verdicts.subject(audit))


def _grouped(rows: list[Row]) -> list[tuple[str, list[Row]]]:
    """Rows of the same variant, which are beside each other already."""
    return [(variant, list(own)) for variant, own in groupby(rows, key=lambda row: row.variant)]


def _chapter(audit: Audit, attack: dict[str, Any], pictures: Mapping[str, bytes]) -> AttackSection:
    rows, controls = verdicts.rows(attack), verdicts.rows(attack, control=True)
    metrics = dict.fromkeys(row.metric for row in (*rows, *controls))
    shown = [row for row in rows if any(each.finding["pictures"] for each in row.cells.values())]
    telling = list({row.variant: row for row in sorted(shown, key=_distance)}.values())
    return AttackSection(
        attack,
        _glances(rows),
        rows,
        controls,
        [(metric, verdicts.METRICS.get(metric, ("", ""))[1]) for metric in metrics],
        [each for row in telling for each in _exhibits(row, pictures)],
        [each for row in shown if row not in telling for each in _exhibits(row, pictures)],
        [each for row in controls for each in _exhibits(row, pictures)],
        verdicts.spoilt(audit, attack),
    )


def _glances(rows: list[Row]) -> dict[str, AttackSummary]:
    found: dict[str, list[Verdict]] = {}
    for row in rows:
        for scheme, each in row.cells.items():
            found.setdefault(scheme, []).append(each)
    glances = {}
    for scheme, cells in found.items():
        bad = [each for each in cells if each.finding["succeeds"]]
        glances[scheme] = AttackSummary(verdicts.worst(bad or cells), len(cells), len(bad))
    return glances


def _distance(row: Row) -> float:
    """How far from chance the worst verdict is."""
    worst = verdicts.worst(list(row.cells.values())).finding
    return abs(float(worst["value"]) - float(worst["chance"]))


def _exhibits(row: Row, pictures: Mapping[str, bytes]) -> list[RecoveredImages]:
    found = []
    for each in row.cells.values():
        named = sorted(each.finding["pictures"].items(), key=lambda item: item[0] != "real")
        shown = [(caption, f"data:image/png;base64,{base64.b64encode(pictures[at]).decode()}") for caption, at in named]
        if shown:
            found.append(RecoveredImages(each, row.variant, shown))
    return found
