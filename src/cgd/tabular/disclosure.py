"""What the others have learned of all records together, in words for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cgd.tabular.federated_stats import Category

if TYPE_CHECKING:
    from cgd.tabular.settings import TabularSettings
    from cgd.tabular.training import TrainingResult

EVERYONE = "every participant"
SAME_COLUMNS = "every participant that holds the same columns"


def revealed(setting: TabularSettings, trained: TrainingResult) -> list[dict[str, Any]]:
    """One row for each kind of sum that was opened: what it says, to whom, how often, and of how many numbers."""
    statistics = SAME_COLUMNS if setting.in_columns else EVERYONE
    gradients = f"{EVERYONE} (the first layer's: {SAME_COLUMNS})" if setting.in_columns else EVERYONE
    parameters = sum(each.numel() for each in trained.network.parameters())
    numbers = [each for each in setting.own_columns if each.type == "number"]
    learned = [each.name for each in setting.own_columns if each.type == "category" and not each.categories]
    found = [len(each.categories) for each in trained.preparation.columns if isinstance(each, Category)]
    rows = [
        _row(
            "the sum of all gradients, weighted by everybody's number of records", gradients, trained.steps, parameters
        ),
        _row("the number of training records of all together, anew if the members change", EVERYONE, 1, 1),
    ]
    if numbers:
        what = "of every number column: how many values there are, how many are missing, their mean and deviation"
        rows.append(_row(what, statistics, 1, 4 * len(numbers)))
    if found:
        which = f", and which categories there are in {', '.join(learned)}" if learned else ""
        what = f"of every category column: how many records have each category{which}"
        rows.append(_row(what, statistics, 1, sum(found)))
    if learned:
        rows.append(_row("how many different categories everybody has, added up", statistics, 1, 1))
    if setting.data.task == "classification":
        which = "" if setting.data.classes else ", and which classes there are"
        rows.append(_row(f"how many records each class has{which}", EVERYONE, 1, len(trained.preparation.classes)))
        if not setting.data.classes:
            rows.append(_row("how many different classes everybody has, added up", EVERYONE, 1, 1))
    else:
        rows.append(_row("the number of values of the target, their mean and deviation", EVERYONE, 1, 3))
    what = "the validation loss of all together, and the number of validation records"
    rows.append(_row(what, EVERYONE, len(trained.looks), 2))
    if setting.in_columns:
        rows.append(_row("whether the files of the row have the same IDs", "the row", 1, 0))
        what = "what the row's models say together of each validation record"
        rows.append(_row(what, "the row", 1, trained.validation.rows * trained.preparation.outputs))
    return rows


def _row(what: str, to: str, times: int, numbers: int) -> dict[str, Any]:
    return {"what": what, "to": to, "times": times, "numbers": numbers}
