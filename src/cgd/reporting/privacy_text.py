"""The guarantee of differential privacy in words, for the report of a run."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cgd.reporting.run_file import BudgetInfo, PrivacyInfo

PROMISE = (
    "If a record about you was used here, the other participants cannot learn much about it from what they received: "
    "whether it was used or not makes hardly any difference to what they see."
)
COVERED = (
    "Everything that left us: statistics of the columns, the number of records, every step of the training, and the "
    "validation loss."
)
SINGLE_RECORDS = "Each record counts by itself; for a person with several records the promise is weaker."
TIME = "How long our computer took for its answers is not covered."
NOT_COVERED = (
    "This page, our model and the other files of this run. They are exact, and made from our own records. If they are "
    "published, nothing is promised about them."
)


def describe_guarantee(privacy: PrivacyInfo) -> dict[str, str]:
    """Return paragraphs that a patient can understand, by their headings.

    Examples:
        >>> from cgd.reporting.run_file import PrivacyInfo
        >>> describe_guarantee(PrivacyInfo(epsilon=1.0, delta=1e-6, colluders=4, members=5))["Against whom"]
        'Against all other participants together, whatever they do.'
    """
    paragraphs = {
        "What is promised": PROMISE,
        "How much": _amount(privacy.epsilon, privacy.delta),
        "Against whom": _coalition(privacy.colluders, privacy.members),
        "What it covers": f"{COVERED} {_unit(privacy.unit)} {TIME}",
        "What it does not cover": NOT_COVERED,
    }
    return paragraphs | ({} if privacy.budget is None else {"All trainings together": _budget(privacy.budget)})


def _amount(epsilon: float, delta: float) -> str:
    certainty = 100 / (1 + math.exp(-epsilon))
    factor = f"{math.exp(epsilon):.3g}" if epsilon < 700 else "an enormous number"
    cases = f", once in {round(1 / delta):,} cases" if 1e-15 < delta < 0.1 else ""
    return (
        "Take somebody who knows everything about you and all others, and thinks before the training that your record "
        f"is used as likely as not. After it, that person can be {certainty:.3g} % sure at most, instead of 50 %. More "
        f"exactly: with your record, the probability of anything that they may see changes by a factor of at most e^ε "
        f"= {factor} (ε = {epsilon:g}), and this fails with a probability of at most δ = {delta:g}{cases}."
    )


def _unit(unit: str) -> str:
    if not unit:
        return SINGLE_RECORDS
    return (
        f"All our records with the same value in the column {unit} count as one: the promise is for them together. For "
        "somebody whose records are at two participants it is weaker."
    )


def _coalition(colluders: int, members: int | None) -> str:
    weaker = "the promise is weaker"
    if members is not None and colluders >= members - 1:
        return "Against all other participants together, whatever they do."
    if not colluders:
        return (
            "Against everybody outside who sees what was opened, if every participant adds its part of the noise. A "
            f"participant knows its own part; against participants {weaker}."
        )
    if colluders == 1:
        return (
            "Against every single participant, if all others add their part of the noise. If two of them combine what "
            f"they know, {weaker}."
        )
    return (
        f"Against any {colluders} participants that combine what they know and add no noise. If more of them do, "
        f"{weaker}."
    )


def _budget(budget: BudgetInfo) -> str:
    return (
        f"With this training, ε = {budget.spent:.3g} of {budget.epsilon:g} at δ = {budget.delta:g} is spent for these "
        f"records. The file {budget.file} has the list, and a training beyond it is refused."
    )
