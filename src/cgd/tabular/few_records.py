"""Features that few training records have in common: these records are merged with others before the first step.

The gradient of a feature that one record alone has, such as the category "other" or a missing value, is that record's
error, in every step; so is the gradient of the bias minus that of a feature that all records but one have. From the
errors of all steps, another participant that only watches computed whole records, with any activation, and without a
hidden layer. So no feature may divide the training records of a participant into a few and the rest:

- Of a column of categories, every record has one state: a category, "other", or missing. Records of a state that fewer
  than `rare` training records have get the most frequent state.
- Of a column of numbers, those that differ from the most frequent one become equal to it, if they are fewer than
  `rare`. If fewer than `rare` are missing, these get that number, too, if all others have it; else the mean, without
  the feature that says that they are missing. If fewer than `rare` are present, all are missing.

With batches, the sum of a step is about the records of a batch, so the same is done again in every batch: a feature
that five training records have is otherwise that of one record in a small batch. (An update of local epochs is about
all training records.)

Features are merged, not values, because a category that nobody else has is "other" in features only. It is done for
training records alone: the validation split divides records at random, so a value that `rare` records have may be that
of one training record. Validation records keep their features, because only the sum of their losses is opened.

It is no proof that nothing is read. A difference of two columns, such as values that are missing together in all
records but one, can still be about few records, and sums about `rare` records say something about them. Only noise
bounds that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cgd.tabular.federated_stats import CategoryStats
from cgd.tabular.rare_values import differing, fold_rare_values, list_columns

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from cgd.federation.data_schema import Column, Data
    from cgd.tabular.dataset import TabularDataset
    from cgd.tabular.preprocessing import Preprocessing
    from cgd.tabular.settings import TabularSettings

    Matrix = npt.NDArray[np.float32]


def merge_few_records(matrix: Matrix, preprocessing: Preprocessing, data: Data) -> dict[str, int]:
    """Merge, in place, the features that few of our training records have with those of the others.

    Args:
        matrix: the features of our training records, of rare values that were folded.
        preprocessing: the statistics by which they were encoded.
        data: the schema.

    Returns:
        The columns that were changed, with the number of records.
    """
    rare = {each.name: data.rare_of(each) for each in data.input_columns}
    changed = {}
    for column, part in preprocessing.parts():
        merge = _merge_states if isinstance(column, CategoryStats) else _merge_numbers
        changed[column.name] = merge(matrix[:, part], rare[column.name])
    return {name: count for name, count in changed.items() if count}


def few_states(records: TabularDataset, data: Data, columns: Sequence[Column]) -> dict[str, int]:
    """Return the columns that will be changed in training, whatever the others have, with the number of records.

    After the validation split there may be more. The records may have rare values.
    """
    records = fold_rare_values(records, data, columns)
    found = {}
    for column in columns:
        if column.type == "category":
            values = records.categories[column.name]
            counts = [values.missing, *values.counts().tolist()]
        else:
            counts = [int(np.count_nonzero(np.isnan(records.numbers[column.name])))]
        found[column.name] = sum(count for count in counts if count < min(data.rare_of(column), records.rows))
    return {name: count for name, count in found.items() if count}


def batch_notes(settings: TabularSettings, samples: int) -> tuple[str, ...]:
    """Return the note about batches with so few of our training records that all of their features are merged.

    In local steps nothing is merged; there the note is about batches of a single record.
    """
    training = settings.training
    records, rare = samples // training.batches, max(settings.data.rare_of(each) for each in settings.own_columns)
    if training.local_epochs:
        if training.batches <= samples:
            return ()
        note = (
            f"batches is {training.batches:,}, and we have {samples:,} training records: each of our batches is a "
            "single record, and a local epoch uses our records several times; use fewer batches"
        )
        return (note,)
    if training.batches == 1 or records >= rare:
        return ()
    note = (
        f"batches is {training.batches}, so a batch has {records or 1} of our {samples:,} training records; features "
        f"that fewer than {rare} records of a batch have are merged, so that nearly nothing is learned from ours: use "
        "fewer batches"
    )
    return (note,)


def merge_notes(changed: Mapping[str, int]) -> tuple[str, ...]:
    """Return the note about columns that are changed in training, if there are any."""
    if not changed:
        return ()
    note = (
        "in training, records that share their category, or that a value is missing, with few others count as the most "
        "frequent category or number, or as the mean, because gradients would be about these records alone: "
        f"{list_columns(changed)}"
    )
    return (note,)


def _merge_states(features: Matrix, rare: int) -> int:
    """Merge the states of a column of categories; return the number of changed records."""
    states = np.where(features.any(axis=1), features.argmax(axis=1), -1)
    found, places, counts = np.unique(states, return_inverse=True, return_counts=True)
    if len(found) < 2:
        return 0
    most = counts.argmax()
    few = (counts[places] < rare) & (places != most)
    features[few] = features[np.flatnonzero(places == most)[0]]
    return int(np.count_nonzero(few))


def _merge_numbers(features: Matrix, rare: int) -> int:
    """Merge the numbers of a column, and its missing ones; return the number of changed records."""
    before = features.copy()
    values = features[:, 0].copy()
    absent = features[:, 1] > 0 if features.shape[1] > 1 else np.zeros(len(values), dtype=bool)
    values[absent] = np.nan
    few = differing(values)
    equal = np.count_nonzero(few) < rare
    if equal and (~absent).any():
        values[~absent] = values[~absent & ~few][0]
    if 0 < np.count_nonzero(~absent) < rare:
        values[:], absent = np.nan, np.full(len(values), len(values) >= rare)
    elif np.count_nonzero(absent) < rare:
        values[absent] = values[~absent][0] if equal and not absent.all() else 0  # 0 is the mean
        absent = np.zeros(len(values), dtype=bool)
    features[:, 0] = np.nan_to_num(values)
    features[:, 1:] = absent[:, None]
    return int(np.count_nonzero((features != before).any(axis=1)))
