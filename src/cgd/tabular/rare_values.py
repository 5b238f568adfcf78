"""Values of few records: they are not disclosed in any form.

Where categories are learned, a value that few records of a participant have may identify a person: a name, a date of
birth, a rare disease. So each participant replaces its values of fewer than `rare` records by "other" before anything
is sent, also those that others have: otherwise a dishonest participant could have a name opened that it guesses, and
see in the counts, or in the gradients of that feature, whether somebody has it. Values that no other participant claims
become "other", too (`cgd.tabular.category_union`).

Of a column of numbers, the count, the mean and the deviation are opened. If only one record has a value, the mean is
that value; if one other participant has values, it subtracts its own from the sums. So the numbers of a participant
that has fewer than `rare` of them in a column count as missing, in sums and features alike. The target of a regression
needs no such rule, because every participant has one of every record.

Classes are not replaced: a model predicts what they say. Every class must occur at two participants, and a target that
looks like a column of names is refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from cgd.errors import InputError
from cgd.federation.data_schema import OTHER, RARE
from cgd.tabular.columns import MISSING_CODE, Categorical

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from cgd.federation.data_schema import Column, Data
    from cgd.tabular.dataset import TabularDataset

# Of our values: with more of them, the column says nothing about most of our records, and is not worth its disclosure.
MAX_OTHER_SHARE = 0.5
MAX_RARE_CLASSES = 20  # a target of more classes, most of whose records are in rare ones, is a column of names


def value_counts(values: Categorical) -> dict[str, int]:
    """Return the number of records of each value that occurs."""
    return {name: int(count) for name, count in zip(values.names, values.counts(), strict=True) if count}


def rare_values(values: Categorical, rare: int) -> dict[str, int]:
    """Return the values of fewer than `rare` records, with their numbers of records, except "other"."""
    return {name: count for name, count in value_counts(values).items() if count < rare and name != OTHER}


def fold_rare_values(records: TabularDataset, data: Data, columns: Sequence[Column]) -> TabularDataset:
    """Return the records with "other" in place of rare values of learned categories, and without few numbers.

    It is not for sums with noise, which covers single values.

    Raises:
        InputError: there are rare values, and the schema has `other = false`.
    """
    folded = dict(records.categories)
    for column in columns:
        if column.is_learned and (few := rare_values(folded[column.name], data.rare_of(column))):
            if not data.other:
                raise _refusal(column, len(few), data.rare_of(column))
            folded[column.name] = _fold(folded[column.name], few)
    numbers = dict(records.numbers)
    for column in columns:
        if column.type == "number" and 0 < _present(numbers[column.name]) < data.rare_of(column):
            numbers[column.name] = np.full(records.rows, np.nan)
    return replace(records, numbers=numbers, categories=folded)


def count_categories(values: Categorical, categories: Sequence[str]) -> list[int]:
    """Return the number of records of each category; "other", if it is one of them, has all remaining ones."""
    own = value_counts(values)
    counts = [own.pop(name, 0) for name in categories]
    if OTHER in categories:
        counts[categories.index(OTHER)] += sum(own.values())
    return counts


def is_mostly_other(values: Categorical, folded: Mapping[str, int]) -> bool:
    """Return whether too many of a column's values are among those that become "other"."""
    return sum(folded.values()) > MAX_OTHER_SHARE * (len(values.codes) - values.missing)


def check_rare_values(
    records: TabularDataset, data: Data, columns: Sequence[Column], *, private: bool = False
) -> tuple[str, ...]:
    """Check, before anything is sent, what would be learned from our records; return notes for the user.

    Args:
        records: our records.
        data: the schema, as in the federation file.
        columns: the columns that we have.
        private: whether the sums have noise, which covers numbers of few records.

    Raises:
        InputError: there are rare values and the schema has `other = false`, or the classes look like names.
    """
    if isinstance(records.target, Categorical) and not data.classes:
        _check_classes(value_counts(records.target), data.rare, data.target)
    fold_rare_values(records, data, columns)
    single = tuple(
        f"column {column.name!r}: rare is 1, so others learn every value that another participant has, or guesses"
        for column in columns
        if column.is_learned and data.rare_of(column) == 1
    )
    folded = tuple(
        _rare_note(column, records.categories[column.name], few, data.rare_of(column))
        for column in columns
        if column.is_learned and (few := rare_values(records.categories[column.name], data.rare_of(column)))
    )
    numbers = [] if private else [each for each in columns if each.type == "number"]
    notes = (_few_numbers_note(each.name, _present(records.numbers[each.name]), data.rare_of(each)) for each in numbers)
    return (*single, *folded, *filter(None, notes))


def _present(values: npt.NDArray[np.float64]) -> int:
    return int(np.count_nonzero(~np.isnan(values)))


def _few_numbers_note(name: str, present: int, rare: int) -> str:
    if 0 < present < rare:
        which = "1 value counts" if present == 1 else f"{present:,} values count"
        return (
            f"column {name!r}: we have fewer than {rare:,} values, and the sums could disclose them: {which} as "
            "missing; leave the column out, or use a table with more of them"
        )
    if rare == 1 and 0 < present < RARE:
        which = "1 value: others may read it" if present == 1 else f"{present} values: others may read them"
        return f"column {name!r}: rare is 1, and we have {which} from the opened mean"
    return ""


def _rare_note(column: Column, values: Categorical, few: Mapping[str, int], rare: int) -> str:
    note = (
        f"column {column.name!r}: {_values_have(len(few))} fewer than {rare} records "
        f"({records_text(sum(few.values()))} in total); nobody else learns them: they count as {OTHER!r}"
    )
    if not is_mostly_other(values, few):
        return note
    return (
        f"{note}. These are more than half of our values, so the column says nothing about most of our records: list "
        "its categories, join them to larger ones by `values` in [data.columns], or leave the column out"
    )


def _check_classes(counts: Mapping[str, int], rare: int, target: str) -> None:
    few = [count for count in counts.values() if count < rare]
    if len(counts) > MAX_RARE_CLASSES and 2 * sum(few) > sum(counts.values()):
        raise InputError(
            f"column {target!r} has {len(counts)} different values, and {len(few)} of them have fewer than {rare} "
            "records: is it the column to predict? Classes are compared with those of other participants. Name the "
            "column to predict with --label, write task = 'regression', or list the classes in [data]"
        )


def _fold(values: Categorical, few: Mapping[str, int]) -> Categorical:
    names = tuple(dict.fromkeys((*(name for name in values.names if name not in few), OTHER)))
    places = {name: place for place, name in enumerate(names)}
    codes = [places[OTHER if name in few else name] for name in values.names]
    lookup = np.array([*codes, MISSING_CODE], dtype=np.int32)  # the last element is for the code of a missing value
    return Categorical(lookup[values.codes], names)


def _refusal(column: Column, few: int, rare: int) -> InputError:
    return InputError(
        f"column {column.name!r}: {_values_have(few)} fewer than {rare} of our records. Its categories are to be "
        "learned, which would disclose them to all participants. List the categories in [data.columns], leave the "
        f"column out, or remove other = false from [data]: then they count as {OTHER!r}"
    )


def _values_have(count: int) -> str:
    return "1 value has" if count == 1 else f"{count:,} values have"


def records_text(count: int) -> str:
    """Return a number of records: "3 records"."""
    return f"{count:,} record{'' if count == 1 else 's'}"
