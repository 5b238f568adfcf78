"""An audit as an HTML page for a privacy officer: the values for the template.

Texts from the file stay texts: the template escapes them, and the page's content security policy forbids scripts and
external addresses. The page contains the pictures.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from cgd.audit import verdicts
from cgd.reporting.html import compact, templates

if TYPE_CHECKING:
    from cgd.audit.results import AttackFindings, Audit
    from cgd.audit.verdicts import Row, Verdict


@dataclass(frozen=True)
class AttackSummary:
    """An attack against a scheme in all its settings.

    Attributes:
        verdict: the worst verdict, of the settings in which the attack succeeds if there are any.
        settings: the number of settings.
        leaks: the number of settings in which the attack succeeds.
    """

    verdict: Verdict
    settings: int
    leaks: int

    @property
    def extent(self) -> str:
        """The number of settings in which it succeeds, if there are several."""
        if self.settings == 1 or not self.leaks:
            return ""
        if self.leaks < self.settings:
            return f"in {self.leaks} of {self.settings} settings"
        return "in both settings" if self.settings == 2 else f"in all {self.settings} settings"


@dataclass(frozen=True)
class RecoveredImages:
    """Pictures of one result.

    Attributes:
        verdict: the verdict on the result.
        variant: the variant of the attack.
        pictures: captions and addresses, those of real records first.
    """

    verdict: Verdict
    variant: str
    pictures: list[tuple[str, str]]


@dataclass(frozen=True)
class AttackSection:
    """The section of an attack on the page.

    Attributes:
        attack: its texts and results.
        summaries: a summary for each scheme.
        rows: all settings.
        controls: all controls.
        metrics: the names and meanings of its metrics.
        images: pictures of the setting of each variant that is furthest from chance.
        more_images: pictures of the other settings.
        control_images: pictures of controls.
        unmeasured: the schemes against which it was not measured, with the reason in a word or two.
    """

    attack: AttackFindings
    summaries: dict[str, AttackSummary]
    rows: list[Row]
    controls: list[Row]
    metrics: list[tuple[str, str]]
    images: list[RecoveredImages]
    more_images: list[RecoveredImages]
    control_images: list[RecoveredImages]
    unmeasured: dict[str, str]

    @property
    def details(self) -> list[tuple[Row, str, Verdict]]:
        """The results with further figures, with their row and scheme."""
        cells = [(row, scheme, each) for row in self.rows for scheme, each in row.cells.items()]
        return [each for each in cells if each[2].result.detail]


def render(audit: Audit) -> str:
    """Return the page of an audit whose pictures are `data:` URIs (`results.load_with_pictures`)."""
    subject = verdicts.subject(audit)
    subject_first = sorted(audit.schemes, key=lambda scheme: scheme != subject)
    text = (
        templates("cgd.audit")
        .get_template("audit.html.jinja")
        .render(
            audit=audit,
            subject=subject,
            subject_name=verdicts.scheme_name(audit, subject),
            counts={scheme: verdicts.count_verdicts(audit, scheme) for scheme in subject_first},
            short=verdicts.SHORT,
            summary=verdicts.summary(audit),
            sections=[_section(audit, attack) for attack in audit.attacks],
            by_variant=_by_variant,
            controls=verdicts.controls(audit),
            failed_controls=verdicts.failed_controls(audit),
            inapplicable=[(attack, each) for attack in audit.attacks for each in attack.inapplicable],
            confidential=audit.source.kind != "embedded",
        )
    )
    return compact(text)


def _by_variant(rows: list[Row]) -> list[tuple[str, list[Row]]]:
    """Group rows by variant; rows of one variant are adjacent."""
    return [(variant, list(own)) for variant, own in groupby(rows, key=lambda row: row.variant)]


def _section(audit: Audit, attack: AttackFindings) -> AttackSection:
    rows, controls = verdicts.rows(attack), verdicts.rows(attack, control=True)
    metrics = dict.fromkeys(row.metric for row in (*rows, *controls))
    illustrated = [row for row in rows if any(each.result.pictures for each in row.cells.values())]
    # The last one of each variant stays: the furthest from chance.
    main = list({row.variant: row for row in sorted(illustrated, key=_distance)}.values())
    return AttackSection(
        attack,
        _summaries(rows),
        rows,
        controls,
        [(metric, verdicts.METRICS.get(metric, ("", ""))[1]) for metric in metrics],
        [each for row in main for each in _images(row)],
        [each for row in illustrated if row not in main for each in _images(row)],
        [each for row in controls for each in _images(row)],
        verdicts.unmeasured(audit, attack),
    )


def _summaries(rows: list[Row]) -> dict[str, AttackSummary]:
    found: dict[str, list[Verdict]] = {}
    for row in rows:
        for scheme, each in row.cells.items():
            found.setdefault(scheme, []).append(each)
    summaries = {}
    for scheme, cells in found.items():
        leaks = [each for each in cells if each.result.succeeds]
        summaries[scheme] = AttackSummary(verdicts.worst(leaks or cells), len(cells), len(leaks))
    return summaries


def _distance(row: Row) -> float:
    return verdicts.distance(verdicts.worst(list(row.cells.values())).result)


def _images(row: Row) -> list[RecoveredImages]:
    return [
        RecoveredImages(each, row.variant, sorted(each.result.pictures.items(), key=lambda item: item[0] != "real"))
        for each in row.cells.values()
        if each.result.pictures
    ]
