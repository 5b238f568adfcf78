"""The guarantee of differential privacy in words, for the report of a run."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from cgd.dp.accountant import exceedance, mu_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from cgd.reporting.run_file import BudgetInfo, CostInfo, PrivacyInfo

PROMISE = (
    "If {records} about you {were} used here, the other participants cannot learn much about {them} from what they "
    "received: whether {they} {were} used or not makes hardly any difference to what they see."
)
ONE_RECORD = {"records": "a record", "were": "was", "them": "it", "they": "it", "your_records": "your record"}
ALL_RECORDS = {"records": "records", "were": "were", "them": "them", "they": "they", "your_records": "your records"}
"""The words for what is protected: a record, or with `unit` all records of one person."""
COVERED = (
    "Everything that left us: statistics of the columns, the number of {records}, every step of the training, and the "
    "validation loss."
)
SINGLE_RECORDS = "Each record counts by itself; for a person with several records the promise is weaker."
TIME = "How long our computer took for its answers is not covered."
NOT_COVERED = (
    "This page, our model and the other files of this run. They are exact, and made from our own records. If they are "
    "published, nothing is promised about them. Nor is a training of cgd without [privacy] on the same records "
    "covered, before or after this one: its sums are exact, and the budget does not know about it."
)


def describe_guarantee(privacy: PrivacyInfo) -> dict[str, str]:
    """Return paragraphs that a patient can understand, by their headings.

    Examples:
        >>> from cgd.reporting.run_file import PrivacyInfo
        >>> describe_guarantee(PrivacyInfo(epsilon=1.0, delta=1e-6, colluders=4, members=5))["Against whom"]
        'Against all other participants together, whatever they do.'
    """
    words = ALL_RECORDS if privacy.unit else ONE_RECORD
    paragraphs = {
        "What is promised": PROMISE.format_map(words),
        "How much": _amount(privacy, words),
        "Against whom": _coalition(privacy.colluders, privacy.members) + _absence(privacy),
        "What it covers": f"{COVERED.format(records=_counted(privacy.unit))} {_unit(privacy.unit)} {TIME}",
        "What it does not cover": NOT_COVERED,
    }
    if privacy.cost is not None:
        paragraphs["What it costs"] = _cost(privacy.cost)
    return paragraphs | ({} if privacy.budget is None else {"All trainings together": _budget(privacy.budget)})


def certainty(epsilon: float) -> float:
    """Return how sure somebody can be at most that a record was used, who thought before that it is as likely as not.

    Examples:
        >>> round(certainty(1.0), 3)
        0.731
    """
    return 1 / (1 + math.exp(-epsilon))


def describe_epsilon(epsilon: float, delta: float) -> str:
    """Return the meaning of ε in one sentence.

    Examples:
        >>> describe_epsilon(1.0, 1e-6)  # doctest: +ELLIPSIS
        'epsilon = 1 means: ... can be 73.1 % sure at most after the training, in all but about one of 50,000 cases'
    """
    return (
        f"epsilon = {epsilon:g} means: somebody who knows everything else, and thinks that your record was used as "
        f"likely as not, can be {_percent(epsilon)} sure at most after the training{_exception(epsilon, delta)}"
    )


def points(losses: Iterable[float]) -> str:
    """Return the range of losses of accuracy; below zero, noise did no harm.

    Examples:
        >>> points([0.0123, -0.001]), points([0.01])
        ('0.0 to 1.2 points', '1.0 points')
    """
    found = [f"{100 * max(0.0, each):.1f}" for each in losses]
    low, high = min(found, key=float), max(found, key=float)
    return f"{low if low == high else f'{low} to {high}'} points"


def _exception(epsilon: float, delta: float) -> str:
    """Return how often somebody may be more sure than that, which is not δ: see `exceedance`."""
    probability = exceedance(mu_of(epsilon, delta), epsilon) if 0 < delta < 1 else 1.0
    if probability < 1e-15:
        return ", practically without exception"
    if probability > 0.1:
        return f", in all but {100 * probability:.2g} % of the cases"
    return f", in all but about one of {float(f'{1 / probability:.2g}'):,.0f} cases"


def _percent(epsilon: float) -> str:
    return f"{100 * certainty(epsilon):.{3 if epsilon < 4 else 5}g} %"


def _amount(privacy: PrivacyInfo, words: Mapping[str, str]) -> str:
    epsilon, delta = privacy.epsilon, privacy.delta
    factor = f"{math.exp(epsilon):.3g}" if epsilon < 700 else "an enormous number"
    yours, were = words["your_records"], words["were"]
    text = (
        f"Take somebody who knows everything about you and all others, and thinks before the training that {yours} "
        f"{were} used as likely as not. After it, that person can be {_percent(epsilon)} sure at most, instead of "
        f"50 %{_exception(epsilon, delta)}. More exactly: with {yours}, anything that they may see has at most e^ε = "
        f"{factor} times the probability (ε = {epsilon:g}) that it has without, plus δ = {delta:g}, and the same the "
        "other way round."
    )
    if privacy.clip is None:
        return text
    whose = "the mean gradient of your records" if privacy.unit else "the gradient of your record"
    return f"{text} In every step, {whose} counts with a norm of at most C = {privacy.clip:g}, which the noise hides."


def _counted(unit: str) -> str:
    return f"different values of {unit}" if unit else "records"


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


def _absence(privacy: PrivacyInfo) -> str:
    if privacy.quorum is None:
        return ""
    return f" Also while participants are absent: in every sum there were at least {privacy.quorum}."


def _budget(budget: BudgetInfo) -> str:
    return (
        f"With this training, ε = {budget.spent:.3g} of {budget.epsilon:g} at δ = {budget.delta:g} is spent for these "
        f"records. The file {budget.file} has the list, and a training beyond it is refused."
    )


def _cost(cost: CostInfo) -> str:
    text = "Noise makes a model less accurate. The same model without noise was not trained. "
    if cost.unknown is not None or not cost.accuracy or not cost.auc:
        return f"{text}There are no measurements to compare with: {cost.unknown or 'none are in this file'}."
    low, high = (f"{max(0.0, each):.3f}" for each in (min(cost.auc), max(cost.auc)))
    datasets = ", ".join(cost.datasets or [])
    return (
        f"{text}On public data sets ({datasets}), with as much noise for the number of records and columns, the "
        f"accuracy was {points(cost.accuracy)} below that without noise, and the AUC {low} to {high}. With our "
        "records, the loss may be smaller or larger."
    )
