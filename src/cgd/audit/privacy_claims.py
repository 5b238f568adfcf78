"""Claims of the paper about privacy and about the system, judged by the stored audits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

from msgspec import Struct

from cgd.audit import results
from cgd.audit.verdicts import format_value, rows
from cgd.errors import InputError
from cgd.experiments.claims import Claim, Finding, Judgement, every, not_checkable, shown_by_tests
from cgd.json_files import damaged_file, decode_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from cgd.audit.results import AttackResult, Audit
    from cgd.experiments.claims import Evidence

PRIVACY, SYSTEM = "Privacy", "The algorithm and the system"
AUDITS, LEVERAGE = "make audit-results", "make leverage-results"
CONFINED, COMMON = "cgd", "secure"
"""The schemes of the audits that are compared: CGD, and one common model with secure sums."""
MAX_DEVIATIONS = 3.0
"""A mean AUC counts as better than chance if it is more than these standard errors above 0.5."""


class LeveragePoint(Struct, frozen=True):
    """The AUC of membership inference by leverage with a number of records, as `make leverage-results` stores it."""

    records: int
    auc: float
    standard_error: float


class LeverageCurve(Struct, frozen=True):
    """The points of a setting."""

    setting: str
    points: list[LeveragePoint]


@dataclass(frozen=True)
class Draws:
    """The results of one attack in one setting against one scheme, in all stored audits.

    Attributes:
        setting: the setting, with the variant of the attack.
        found: the results.
    """

    setting: str
    found: tuple[AttackResult, ...]

    @property
    def successes(self) -> int:
        """The number of draws in which the attack succeeded."""
        return sum(each.succeeds for each in self.found)

    @property
    def succeeds(self) -> bool:
        """True if the attack succeeded in more than half of the draws."""
        return 2 * self.successes > len(self.found)

    @property
    def figures(self) -> str:
        """The setting, the number of successful draws, and the medians of the value and of chance."""
        metric = self.found[0].metric
        value, chance = (
            format_value(median(each), metric)
            for each in ([one.value for one in self.found], [one.chance for one in self.found])
        )
        return f"{self.setting}: {self.successes} of {len(self.found)} draws, {metric} {value} (chance {chance})"


def read_audits(folder: Path) -> list[Audit]:
    """Return the audits that `make audit-results` stored below a folder; none if there are none."""
    return [results.load(path.parent) for path in sorted((folder / "audit").glob(f"*/{results.FILE}"))]


def all_draws(audits: Sequence[Audit], attack: str, scheme: str) -> dict[str, Draws]:
    """Return the results of an attack against a scheme, by setting."""
    collected: dict[str, list[AttackResult]] = {}
    for audit in audits:
        for each in (found for found in audit.attacks if found.id == attack):
            for row in (row for row in rows(each) if scheme in row.cells):
                setting = ", ".join(filter(None, (row.variant, row.setting)))
                collected.setdefault(setting, []).append(row.cells[scheme].result)
    return {setting: Draws(setting, tuple(found)) for setting, found in collected.items()}


def _select(evidence: Evidence, audits: Sequence[Audit], attack: str, text: str) -> list[Draws]:
    """Return the results of an attack against CGD in the settings that contain a text.

    Raises:
        LookupError: the audits have no such setting.
    """
    if not audits:
        evidence.note_missing(AUDITS)
        return []
    found = [each for setting, each in all_draws(audits, attack, CONFINED).items() if text in setting]
    if not found:
        raise LookupError(f"the stored audits have no setting of {attack} with {text!r}")
    return found


def _attack_fails(evidence: Evidence, *, audits: Sequence[Audit], attack: str, text: str = "") -> Judgement:
    draws = _select(evidence, audits, attack, text)
    return every([Finding(not each.succeeds, each.figures) for each in draws])


def _never_distinguished(evidence: Evidence, *, audits: Sequence[Audit]) -> Judgement:
    draws = _select(evidence, audits, "simulator", "")
    return every([Finding(each.successes == 0, each.figures) for each in draws])


def _common_model_leaks(evidence: Evidence, *, audits: Sequence[Audit]) -> Judgement:
    """Count the settings in which attacks succeed against one common model."""
    if not audits:
        evidence.note_missing(AUDITS)
        return Judgement(holds=False, figures="")
    draws = [each for attack in audits[0].attacks for each in all_draws(audits, attack.id, COMMON).values()]
    successes = sum(each.succeeds for each in draws)
    return Judgement(successes > 0, f"attacks succeed in {successes} of {len(draws)} settings")


def _less_than_common_model(evidence: Evidence, *, audits: Sequence[Audit]) -> Judgement:
    """Compare the settings in which attacks succeed against both schemes."""
    if not audits:
        evidence.note_missing(AUDITS)
        return Judgement(holds=False, figures="")
    both = [pair for attack in audits[0].attacks for pair in _pairs(audits, attack.id)]
    common, confined = (sum(each.succeeds for each in side) for side in zip(*both, strict=True))
    figures = (
        f"of {len(both)} settings that were measured against both, attacks succeed in {common} against one common "
        f"model with secure sums and in {confined} against CGD"
    )
    return Judgement(confined < common, figures)


def _pairs(audits: Sequence[Audit], attack: str) -> Iterator[tuple[Draws, Draws]]:
    common, confined = (all_draws(audits, attack, scheme) for scheme in (COMMON, CONFINED))
    yield from ((common[setting], confined[setting]) for setting in common if setting in confined)


def _same_with_more_steps(evidence: Evidence, *, audits: Sequence[Audit]) -> Judgement:
    """Compare the inversion of one round with that of several, draw by draw."""
    one, several = (_select(evidence, audits, "inversion", f"{kind} unknown models") for kind in ("round,", "rounds,"))
    if not one or not several:
        return Judgement(holds=False, figures="")
    pairs = [(few.value, more.value) for few, more in zip(one[0].found, several[0].found, strict=True)]
    better = sum(more > few for few, more in pairs)
    figures = f"{one[0].figures}; {several[0].figures}; more similar in {better} of {len(pairs)} draws"
    return Judgement(2 * better <= len(pairs), figures)


def _no_leverage(evidence: Evidence) -> Judgement:
    """Judge the mean AUC of membership by leverage, at the largest number of records of each setting."""
    path = evidence.folder / "leverage.json"
    if not path.exists():
        evidence.note_missing(LEVERAGE)
        return Judgement(holds=False, figures="")
    try:
        curves = decode_json(path.read_bytes(), list[LeverageCurve])
        if not curves or not all(curve.points for curve in curves):
            raise InputError("it has no curve, or one without points")
    except InputError as error:
        raise damaged_file(path, str(error), f"run `{LEVERAGE}`") from None
    findings = []
    for curve in curves:
        last = max(curve.points, key=lambda point: point.records)
        figures = f"{curve.setting}, {last.records} records: {last.auc:.3f} ± {last.standard_error:.3f}"
        findings.append(Finding(last.auc <= 0.5 + MAX_DEVIATIONS * last.standard_error, figures))
    return every(findings)


def claims(folder: Path) -> tuple[Claim, ...]:
    """Return the claims about privacy and the system, in the order of the page.

    Args:
        folder: folder of all stored results.
    """
    audits = read_audits(folder)
    fails: Callable[..., Callable[[Evidence], Judgement]] = partial(partial, _attack_fails, audits=audits)
    audited = partial(Claim, PRIVACY)
    return (
        audited(
            "A coalition of up to m − 2 curious participants sees nothing of the others' gradients but their sum "
            "(Theorem 2, for one sum: P1).",
            "abstract, §1, theorem 2",
            "in no draw can statistical tests tell real views from those of a simulator that knows only the sum",
            (AUDITS,),
            partial(_never_distinguished, audits=audits),
        ),
        not_checkable(
            PRIVACY,
            "The proofs of Theorems 2 and 3 are right, and bound what a training reveals.",
            "abstract, §1, §5",
            "tests cannot prove a theorem, and both are about a single sum: neither says what many sums reveal "
            "together (N1), which the other rows are about",
        ),
        audited(
            "One common model leaks information about records, although gradients are added securely.",
            "abstract, §1",
            "an attack of the audit succeeds against it, in any setting",
            (AUDITS,),
            partial(_common_model_leaks, audits=audits),
        ),
        audited(
            "CGD exposes less than federated learning with one common model and secure sums.",
            "abstract, §1",
            "attacks succeed (in more than half of the draws) in fewer settings",
            (AUDITS,),
            partial(_less_than_common_model, audits=audits),
        ),
        audited(
            "CGD hides the model at which a gradient was computed, which a common model gives away.",
            "§1, theorem 3",
            "a coalition that takes the displacement for the model fails to explain the sum by it, for every δ that "
            "was tried",
            (AUDITS,),
            fails(attack="theorem3"),
        ),
        audited(
            "In a linear regression, nothing like XᵀX can be derived from what CGD exposes (N2).",
            "§1, §5.3, table 2",
            "a coalition that watches fails to compute XᵀX",
            (AUDITS,),
            fails(attack="gram", text="XᵀX, passive"),
        ),
        audited(
            "Others cannot observe a participant's records (N4).",
            "§1",
            "a coalition that watches fails to recover records, in every setting",
            (AUDITS,),
            fails(attack="records"),
        ),
        audited(
            "Others cannot observe whether a given record is among a participant's (N3).",
            "§1",
            "with the most records that were measured, the mean AUC of membership inference is at most "
            f"{MAX_DEVIATIONS:g} standard errors above 0.5",
            (LEVERAGE,),
            _no_leverage,
        ),
        audited(
            "Privacy does not decrease with the number of steps (N6).",
            "§5.3, table 2",
            "in at most half of the draws, a search finds more similar records from several rounds than from one",
            (AUDITS,),
            partial(_same_with_more_steps, audits=audits),
        ),
        audited(
            "Participants that hold different features of the same samples keep them to themselves. (The grids of "
            "tables 3 to 7 need `joint` columns: N9.)",
            "§6, §7.1",
            "a coalition fails to recover records of a row from `joint` columns",
            (AUDITS,),
            fails(attack="joint"),
        ),
        shown_by_tests(
            PRIVACY,
            "Models, origins and gradients never leave their participant (P2).",
            "§1",
            "no message contains them, encoded or not",
            ("tests/optim/test_confinement.py::test_origin_weights_and_gradients_are_not_sent",),
        ),
        not_checkable(
            PRIVACY,
            "If each participant chooses its own δ, the average distance between the models stays secret.",
            "§1",
            "no attack of ours uses that distance, so that nothing was measured with and without it",
        ),
        *_system(),
    )


def _system() -> tuple[Claim, ...]:
    shown = partial(shown_by_tests, SYSTEM)
    return (
        shown(
            "Any two confined models keep the same distance during the whole training.",
            "§1, figure 1",
            "a model is its own origin plus a displacement that is the same for all, bit for bit",
            (
                "tests/simulation/test_simulate.py::test_models_are_origin_plus_displacement",
                "tests/optim/test_optimizer.py::test_displacements_are_bitwise_equal_and_origins_are_kept",
            ),
        ),
        shown(
            "CGD trains any model that gradient descent trains.",
            "§1, §6",
            "a convolutional network, an autoencoder and a linear regression are trained, as examples",
            (
                "tests/simulation/test_simulate.py::test_simulate_convolutional_network",
                "tests/simulation/test_simulate.py::test_simulate_autoencoder",
                "tests/simulation/test_simulate.py::test_simulate_linear_regression",
            ),
        ),
        shown(
            "No central server is needed.",
            "§1",
            "members add vectors over connections between them",
            ("tests/transport/test_base.py::test_members_sum_over_the_transport",),
        ),
        not_checkable(
            SYSTEM,
            "Secure addition is efficient enough for federated learning.",
            "§1",
            "the paper refers to another study and states no times. Ours depend on the machine, so that none are "
            "stored: `make bench` measures the cost of a sum and of a step, and "
            "[Performance](../../docs/performance.md) has one run of it",
        ),
        not_checkable(
            SYSTEM,
            "The experiments ran on an implementation in C++ that exchanges messages over ZeroMQ.",
            "§7",
            "the program that the authors published is a single process, which adds gradients without a protocol",
        ),
    )
