"""The paper's claims, each judged by stored results with a stated criterion, and the page that lists them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cgd.experiments import report_page, reproduce
from cgd.experiments.tables import ResultTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from cgd.experiments.entry_result import EntryResult
    from cgd.experiments.experiment_file import RunEntry
    from cgd.experiments.reproduce import ExperimentResult
    from cgd.experiments.runner import ResultStore

CONFIRMED, NOT_CONFIRMED = "confirmed", "not confirmed"
BY_TESTS, NOT_CHECKABLE, NOT_RUN = "confirmed by tests", "cannot be checked", "not run yet"
VERDICTS = (CONFIRMED, NOT_CONFIRMED, BY_TESTS, NOT_CHECKABLE, NOT_RUN)
MAX_NAMED_RUNS = 3
"""If more runs than these are missing, their number is shown instead of their names."""

_INTRODUCTION = """\
Built by `cgd reproduce claims --scale {scale}` from stored results, without training. Claims are in our own words;
*where* is a place in the paper. Verdicts are computed from the figures by the criterion in *confirmed if*, which is
ours: where the paper says only "close" or "significantly", we had to choose a number. Accuracies are means over the
evaluated participants, unless a criterion says otherwise; differences are in percentage points.

- **confirmed**, **not confirmed**: by that criterion, in our runs. Neither is a statement about all settings.
- **confirmed by tests**: how the algorithm works, which the named tests check. Every version of `cgd` must pass them.
- **cannot be checked**: no run can decide it; the reason is given.
- **not run yet**: results are missing. The commands under *ran* make them, and figures are those so far. A run that is
  planned with several seeds is judged by those that exist.

An attack counts as successful in a setting if it succeeds, by its own rule, in more than half of the draws; CGD has no
noise there. [The threat model](../../docs/threat-model.md#promises) explains P1, P2, … (promises) and
[N1, N2, …](../../docs/threat-model.md#non-promises) (what is not promised)."""


@dataclass(frozen=True)
class Judgement:
    """What results say about a claim.

    Attributes:
        holds: true if they satisfy the criterion; None if they cannot decide.
        figures: the figures, in a few words.
        final: true if missing results cannot change the answer, such as after a counterexample.
        by_tests: true if tests decide, not results.
    """

    holds: bool | None
    figures: str
    final: bool = False
    by_tests: bool = False


@dataclass(frozen=True)
class Finding:
    """One of several comparisons that a claim is about.

    Attributes:
        holds: true if it agrees with the claim.
        figures: its figures, in a few words.
    """

    holds: bool
    figures: str


def every(findings: Sequence[Finding]) -> Judgement:
    """Judge a claim that all findings must agree with: one that does not is enough to refute it."""
    holds = all(each.holds for each in findings)
    return Judgement(holds, "; ".join(each.figures for each in findings), final=not holds)


@dataclass(frozen=True)
class Claim:
    """A claim of the paper.

    Attributes:
        section: heading of the page below which it is listed.
        text: the claim, in our words.
        place: where it is in the paper.
        criterion: when it counts as confirmed.
        ran: commands that make the results; `{scale}` is replaced.
        judge: function that finds the results and judges them.
    """

    section: str
    text: str
    place: str
    criterion: str
    ran: tuple[str, ...]
    judge: Callable[[Evidence], Judgement]


def shown_by_tests(section: str, text: str, place: str, criterion: str, tests: Sequence[str]) -> Claim:
    """Return a claim about the algorithm that tests show; the criterion is what they check."""
    judgement = Judgement(holds=True, figures="no figures", by_tests=True)
    return Claim(section, text, place, criterion, (f"pytest {' '.join(tests)}",), lambda _: judgement)


def not_checkable(section: str, text: str, place: str, reason: str) -> Claim:
    """Return a claim that no run of ours can decide."""
    return Claim(section, text, place, "", (), lambda _: Judgement(holds=None, figures=reason))


@dataclass(frozen=True)
class Evidence:
    """The stored results that a claim is judged by; notes which ones are missing.

    Attributes:
        scale: scale of the runs.
        folder: folder of all stored results.
        experiments: the experiments with their results, by name.
        missing: names of what was looked for and has no result, by experiment or kind of results.
    """

    scale: str
    folder: Path
    experiments: dict[str, ExperimentResult]
    missing: dict[str, list[str]] = field(default_factory=dict)

    def note_missing(self, source: str, *names: str) -> None:
        """Note that results of these names have not been made."""
        known = self.missing.setdefault(source, [])
        known += [name for name in names if name not in known]

    def select(self, experiment: str, chosen: Callable[[RunEntry], bool]) -> list[EntryResult]:
        """Return the entries of an experiment that are chosen and have a result; note the others as missing.

        Raises:
            LookupError: no entry is chosen, so that the claim and the experiment do not fit together.
        """
        entries = [each for each in self.experiments[experiment].found if chosen(each.entry)]
        if not entries:
            raise LookupError(f"no run of {experiment} at the scale {self.scale} is about this claim")
        absent = [each.entry.name for each in entries if not each.results]
        if absent:
            self.note_missing(experiment, *absent)
        return [each for each in entries if each.results]


@dataclass(frozen=True)
class JudgedClaim:
    """A claim with its verdict.

    Attributes:
        claim: the claim.
        verdict: one of VERDICTS.
        figures: what came out.
    """

    claim: Claim
    verdict: str
    figures: str


def experiment_results(scale: str, store: ResultStore) -> dict[str, ExperimentResult]:
    """Return the stored results of the paper's experiments that have this scale, by name."""
    known = reproduce.experiments()
    return {name: reproduce.stored_results(each, scale, store) for name, each in known.items() if scale in each.entries}


def judge(claims: Iterable[Claim], scale: str, store: ResultStore) -> list[JudgedClaim]:
    """Judge the claims by the stored results, without running anything."""
    stored = experiment_results(scale, store)
    judged = []
    for claim in claims:
        evidence = Evidence(scale, store.folder.parent, stored)
        judged.append(_judged(claim, claim.judge(evidence), evidence.missing))
    return judged


def _judged(claim: Claim, judgement: Judgement, missing: Mapping[str, Sequence[str]]) -> JudgedClaim:
    absent = []
    for source, names in missing.items():
        shown = ", ".join(names) if len(names) <= MAX_NAMED_RUNS else f"{len(names)} runs"
        absent.append(f"{source} ({shown})" if shown else source)
    note = f"*missing:* {'; '.join(absent)}" if absent else ""
    figures = "; ".join(filter(None, (judgement.figures, note)))
    if judgement.holds is None:
        verdict = NOT_CHECKABLE
    elif judgement.by_tests:
        verdict = BY_TESTS
    elif missing and not judgement.final:
        verdict = NOT_RUN
    else:
        verdict = CONFIRMED if judgement.holds else NOT_CONFIRMED
    return JudgedClaim(claim, verdict, figures)


def write(claims: Iterable[Claim], scale: str, store: ResultStore) -> Path:
    """Write the page of the claims, and return its path."""
    judged = judge(claims, scale, store)
    counts = Counter(each.verdict for each in judged)
    summary = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS)
    parts = ["# The paper's claims", _INTRODUCTION.format(scale=scale)]
    parts += [report_page.QUICK_SCALE] if scale == "quick" else []
    parts.append(f"Of {len(judged)} claims: {summary}.")
    for section in dict.fromkeys(each.claim.section for each in judged):
        parts += [f"## {section}", _table([each for each in judged if each.claim.section == section], scale)]
    return report_page.save(store.folder / "claims.md", parts)


def _table(judged: Sequence[JudgedClaim], scale: str) -> str:
    header = ("claim", "where", "confirmed if", "ran", "came out", "verdict")
    rows = []
    for each in judged:
        claim = each.claim
        ran = "; ".join(f"`{command.format(scale=scale)}`" for command in claim.ran)
        rows.append((claim.text, claim.place, claim.criterion, ran, each.figures, f"**{each.verdict}**"))
    return ResultTable("", header, tuple(rows)).to_markdown(texts=len(header))
