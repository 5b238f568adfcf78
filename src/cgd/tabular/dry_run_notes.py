"""The notes of a dry run about what needs the others: what can be foreseen of it, and what cannot.

After the first sums, `cgd join` prints notes that depend on the records of all members. Some of them are possible only
if our own table has a certain property, which is known before: these are foreseen, with their condition. The others are
listed as not checked, so that a dry run without notes is not taken for more than it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cgd.federation.data_schema import OTHER
from cgd.reporting.training_report import MIN_RECORDS_TO_JUDGE
from cgd.tabular.columns import Categorical
from cgd.tabular.rare_values import value_counts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from cgd.tabular.dataset import TabularDataset
    from cgd.tabular.settings import TabularSettings
    from cgd.tabular.training import TrainingResult


def foreseen_notes(settings: TabularSettings, foreseen: TrainingResult) -> Iterator[str]:
    """Yield notes about our records that the statistics, or the report, may repeat.

    Args:
        settings: the settings.
        foreseen: the training that these settings and our records would give.
    """
    records = foreseen.records
    if settings.privacy is None:  # with noise, no column is known to be constant
        yield from _empty_columns(settings, records)
    if isinstance(records.target, Categorical):
        yield from _absent_classes(settings, records.target)
    validation = foreseen.validation.rows
    if settings.data.validation and validation < MIN_RECORDS_TO_JUDGE:
        which = f"about {validation}" if validation else "none"
        yield f"{which} of our records would be set aside for validation: too few to judge the model"


def _empty_columns(settings: TabularSettings, records: TabularDataset) -> Iterator[str]:
    empty, equal = [], []
    for column in settings.own_columns:
        if column.type == "category":
            missing = records.categories[column.name].missing
        else:
            values = records.numbers[column.name]
            missing = int(np.count_nonzero(np.isnan(values)))
            if missing < records.rows and np.nanmin(values) == np.nanmax(values):
                equal.append(column.name)
        if missing == records.rows:
            empty.append(column.name)
    if empty:
        yield f"we have no value of {_names(empty)}; if nobody else has one, its features are zero"
    if equal:
        yield f"all our values of {_names(equal)} are equal; if others have no other value, its feature is zero"


def _absent_classes(settings: TabularSettings, target: Categorical) -> Iterator[str]:
    own = value_counts(target)
    absent = [name for name in settings.data.classes if name not in own]
    if absent:
        yield f"we have no record of the class {_names(absent)}; a class that nobody has cannot be learned"
    if len(own) == 1 and not settings.data.classes:
        yield f"all our records are of the class {_names(own)}; if nobody has another one, there is nothing to predict"


def unforeseen(settings: TabularSettings) -> Iterator[str]:
    """Yield lines about what can only be found out together with the others."""
    data, columns = settings.data, settings.own_columns
    numbers = [each.name for each in columns if each.type == "number"] + [data.target] * (data.task == "regression")
    learned = [each.name for each in columns if each.is_learned]
    yield "only with the others this is found out, so no note above does not mean that all is well:"
    yield "  whether the others can be reached, and have the same federation file and version"
    if settings.data.intersection is not None:
        yield "  how many of our records the others of our row have, too; all figures above are about all of ours"
    elif settings.vertical:
        yield "  whether the files of our row have the same IDs"
    if numbers:
        yield f"  whether our values are far from those of all others, as in another unit: {', '.join(numbers)}"
    if data.task == "classification" and not data.classes:
        yield "  whether a class occurs at one participant only, which stops the training"
    if learned:
        effect = f"count as {OTHER!r}" if data.other else "stops the training"
        yield f"  which of our categories nobody else has, which {effect}: {', '.join(learned)}"
    if data.task == "classification":
        yield "  whether a class has no or few records at all participants together"
    yield "  whether a column has no value, or the same value, at all participants"
    if settings.privacy is None:
        yield "  privacy warnings that depend on the records and categories of all, or on what others send"


def _names(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
