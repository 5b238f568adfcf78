"""The folder of an audit, and its HTML page for a privacy officer.

    audit.json    all results
    audit.html    the same as a page that needs no other file
    pictures/     recovered records, with the real ones, if they are pictures

The page is made from the other files, and the same files give the same bytes. Only their owner may read the files: an
audit of a table or of a recorded run contains records.

Texts from audit.json stay texts: the template escapes them, and the page's content security policy forbids scripts and
external addresses. The page contains the pictures.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from cgd.audit import results, verdicts
from cgd.errors import InputError
from cgd.files import write_private
from cgd.reporting.html import compact, templates

if TYPE_CHECKING:
    from pathlib import Path

    from cgd.audit.results import AttackFindings, Audit, RecoveredRecords
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
class RecoveredTable:
    """Records of a table that one result has recovered.

    Attributes:
        verdict: the verdict on the result.
        variant: the variant of the attack.
        table: the records.
    """

    verdict: Verdict
    variant: str
    table: RecoveredRecords


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
        recovered: recovered records of a table, those of the scheme that the audit is about first.
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
    recovered: list[RecoveredTable]
    unmeasured: dict[str, str]

    @property
    def details(self) -> list[tuple[Row, str, Verdict]]:
        """The results with further figures, with their row and scheme."""
        cells = [(row, scheme, each) for row in self.rows for scheme, each in row.cells.items()]
        return [each for each in cells if each[2].result.detail]


def render_page(audit: Audit) -> str:
    """Return the page of an audit whose pictures are `data:` URIs (`results.load_with_pictures`)."""
    subject = verdicts.subject(audit)
    found = [each for attack in audit.attacks for each in attack.findings]
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
            limitations=verdicts.limitations(audit),
            confidential=audit.source.kind != "embedded",
            has_pictures=any(each.pictures for each in found),
            has_records=any(each.recovered for each in found),
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
        _recovered(rows, verdicts.subject(audit)),
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


def _recovered(rows: list[Row], subject: str) -> list[RecoveredTable]:
    found = [
        RecoveredTable(each, row.variant, each.result.recovered)
        for row in rows
        for each in row.cells.values()
        if each.result.recovered is not None
    ]
    return sorted(found, key=lambda each: each.verdict.result.scheme != subject)


PAGE = "audit.html"


def check(folder: Path) -> None:
    """Raise InputError if an audit cannot be written to a folder, before minutes of work; leave nothing behind.

    Raises:
        InputError: the folder cannot be written, or holds other files than an audit, which are never overwritten.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; name a folder with --out")
    if folder.is_dir() and any(folder.iterdir()) and not results.is_audit(folder):
        raise InputError(f"{folder} is not empty and holds no audit; name another folder with --out, or move it away")
    existing = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    try:
        with tempfile.TemporaryDirectory(dir=existing, prefix=".cgd-audit-"):
            pass
    except OSError as error:
        raise InputError(f"{folder} cannot be written ({error.strerror}); name another folder with --out") from None


def write(folder: Path, audit: Audit) -> Path:
    """Write an audit, in place of a former one and its pictures, and return the path of the page.

    Raises:
        InputError: the folder cannot be written, or holds other files than an audit.
    """
    check(folder)
    former = _former_pictures(folder)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    files = results.to_files(audit)
    for path, content in files.items():
        write_private(folder / path, content)
    for path in former - files.keys():
        (folder / path).unlink(missing_ok=True)
    return write_page(folder)


def write_page(folder: Path) -> Path:
    """Make the page from the other files, and return its path.

    Raises:
        InputError: there is no audit, or it is damaged.
    """
    page = folder / PAGE
    write_private(page, render_page(results.load_with_pictures(folder)).encode(errors="replace"))
    return page


def _former_pictures(folder: Path) -> set[str]:
    """Return the pictures of the audit that is replaced, if it can be read."""
    try:
        audit = results.load(folder)
    except InputError:
        return set()
    paths = [path for attack in audit.attacks for each in attack.findings for path in each.pictures.values()]
    return {path for path in paths if path.startswith(f"{results.PICTURES}/")}
