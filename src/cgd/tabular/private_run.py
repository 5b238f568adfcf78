"""Additions to a run with differential privacy: checks before anything is sent, and its report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from cgd.dp.settings import suggested_delta
from cgd.errors import InputError
from cgd.optim.privacy_ledger import PrivacyLedger
from cgd.optim.record_gradients import RecordGradients
from cgd.reporting.run_file import DisclosedSum
from cgd.tabular.models import build
from cgd.tabular.privacy_expectation import expected_cost
from cgd.tabular.sources import budget_path

if TYPE_CHECKING:
    from pathlib import Path

    from cgd.tabular.dataset import TabularDataset
    from cgd.tabular.settings import TabularSettings
    from cgd.tabular.sources import TableSource
    from cgd.tabular.training import TrainingResult

EVERYONE = "every participant"


def check_private(settings: TabularSettings, records: TabularDataset) -> None:
    """Check, before anything is sent, what the federation file alone does not show.

    Raises:
        InputError: δ is not below one divided by the number of our records, or a network of the user's own mixes
            records.
    """
    delta = settings.privacy_settings().delta
    if delta * records.rows >= 1:
        raise InputError(
            f"delta in [privacy] is {delta:g}, and we alone have {records.rows:,} records: a delta of one divided by "
            "their number allows to disclose one of them entirely. Agree on at most a hundredth of one divided by the "
            f"records of all participants together, such as {min(1e-6, suggested_delta(records.rows)):g}"
        )
    if settings.model.kind == "custom":
        sizes = [2 if each.type == "number" else 1 + len(each.categories) for each in settings.own_columns]
        network = build(settings.model, sum(sizes), len(settings.data.classes) or 1)
        gradients = RecordGradients(network, settings.privacy_settings().clip)
        network(torch.zeros(2, sum(sizes)))  # the first call checks the network with made-up records
        gradients.remove()


def open_ledger(
    settings: TabularSettings, federation: str, data: TableSource, budget: Path | None
) -> tuple[PrivacyLedger, tuple[str, ...]]:
    """Return the ledger of a training with the budget of our records, and notes about the budget.

    Args:
        settings: the settings, with [privacy].
        federation: the federation's name, under which the training is charged.
        data: where our records are; the budget is beside a file, unless `budget` names another.
        budget: another file for the budget.

    Raises:
        InputError: the budget cannot be used, or is spent.
    """
    path = budget_path(data, budget)
    ledger = PrivacyLedger(settings.privacy_settings(), path, unit=settings.unit)
    ledger.check(federation)
    file = ledger.file
    if file is None or not file.unused:
        return ledger, ()
    note = (
        f"{file.path} has no charges yet: it is the privacy budget of these records, with a limit of epsilon = "
        f"{file.epsilon:g} at delta = {file.delta:g} for all trainings together. Keep it with them; if trainings on "
        "these records were charged to another file, name that one with --budget"
    )
    return ledger, (note,)


def private_sums(settings: TabularSettings, trained: TrainingResult) -> list[DisclosedSum]:
    """Return the kinds of opened sums; see `cgd.tabular.disclosure.disclosed_sums`."""
    parameters = sum(each.numel() for each in trained.network.parameters())
    sizes = [3 if each.type == "number" else 1 + len(each.categories) for each in settings.own_columns]
    statistics = 1 + sum(sizes) + (len(settings.data.classes) or 2)
    looks = sum(each.everyone_validation_loss is not None for each in trained.evaluations)
    return [
        DisclosedSum("the sum of all clipped gradients, with noise", EVERYONE, trained.steps, parameters),
        DisclosedSum("the number of training records, with noise, again if the members change", EVERYONE, 1, 1),
        DisclosedSum("statistics of the columns and of the target, with noise", EVERYONE, 1, statistics),
        DisclosedSum("the validation loss, and the number of validation records, with noise", EVERYONE, looks, 2),
    ]


def privacy_summary(settings: TabularSettings, trained: TrainingResult, members: int) -> dict[str, Any]:
    """Return the part of run.json about differential privacy.

    Raises:
        InputError: the training was not private.
    """
    ledger, privacy = trained.ledger, settings.privacy_settings()
    if ledger is None:
        raise InputError("the training has no privacy ledger; train with [privacy]")
    file = ledger.file
    total = privacy.budget().mu_squared
    return {
        "epsilon": privacy.epsilon,
        "delta": privacy.delta,
        "clip": privacy.clip,
        "colluders": privacy.colluders,
        "members": members,
        **({} if privacy.quorum is None else {"quorum": privacy.quorum}),
        "unit": settings.unit,
        "spent": [
            {
                "what": each.what,
                "openings": each.openings,
                "records": each.records,
                "share": each.mu_squared / total,
            }
            for each in ledger.spent_on()
        ],
        "budget": None
        if file is None
        else {"file": file.path.name, "epsilon": file.epsilon, "delta": file.delta, "spent": file.epsilon_spent},
        "cost": expected_cost(settings, members, trained.everyone_samples),
    }
