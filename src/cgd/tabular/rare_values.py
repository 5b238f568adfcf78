"""Values of few records: they are not disclosed in any form.

Where categories are learned, a value that few records of a participant have may identify a person: a name, a date of
birth, a rare disease. So each participant replaces its values of fewer than `rare` records by "other" before anything
is sent, also those that others have: otherwise a dishonest participant could have a name opened that it guesses, and
see in the counts, or in the gradients of that feature, whether somebody has it. Values that no other participant claims
become "other", too (`cgd.tabular.category_union`).

Values of listed categories, also those that `values` maps to, count as missing if fewer than `rare` records of a
participant have them, as values that are not listed do: otherwise the author of a federation file could ask for one
person by `values`, and read its count.

Of a column of numbers, the count, the mean and the deviation are opened. If only one record has a value, the mean is
that value; if one other participant has values, it subtracts its own from the sums. The same holds if all values but
one are zero. So numbers that differ from a participant's most frequent value in fewer than `rare` of its records count
as missing, and all its numbers of a column that has fewer than `rare` of them, in sums and features alike. Targets of a
regression are not replaced; their owner is told.

Gradients are of training records only. What few of these have in common is merged there (`cgd.tabular.few_records`).

Classes are not replaced: a model predicts what they say. Every class must occur at two participants, and a target that
looks like a column of names is refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from cgd.errors import InputError
from cgd.federation.data_schema import OTHER, RARE
from cgd.tabular.columns import MISSING_CODE, Categorical

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy.typing as npt

    from cgd.federation.data_schema import Column, Data
    from cgd.tabular.dataset import TabularDataset

# Of our values: with more of them, the column says nothing about most of our records, and is not worth its disclosure.
MAX_OTHER_SHARE = 0.5
MAX_SHOWN = 12  # columns in one note
MAX_RARE_CLASSES = 20  # a target of more classes, most of whose records are in rare ones, is a column of names


def value_counts(values: Categorical) -> dict[str, int]:
    """Return the number of records of each value that occurs."""
    return {name: int(count) for name, count in zip(values.names, values.counts(), strict=True) if count}


def rare_values(values: Categorical, rare: int, *, listed: bool = False) -> dict[str, int]:
    """Return the values of fewer than `rare` records, with their numbers of records, except a learned "other"."""
    few = {name: count for name, count in value_counts(values).items() if count < rare}
    return few if listed else {name: count for name, count in few.items() if name != OTHER}


def differing(values: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.bool_]:
    """Return which numbers differ from the most frequent one; missing values do not."""
    present: npt.NDArray[np.bool_] = ~np.isnan(values)
    found, counts = np.unique(values[present], return_counts=True)
    return np.logical_and(present, values != found[counts.argmax()]) if found.size else present


def fold_rare_values(records: TabularDataset, data: Data, columns: Sequence[Column]) -> TabularDataset:
    """Return the records without values of few records.

    Rare values of learned categories are "other", and those of listed ones are missing; so are few numbers, and numbers
    that differ from nearly all others. It is not for sums with noise, which covers single values.

    Raises:
        InputError: there are rare values of learned categories, and the schema has `other = false`.
    """
    numbers, categories = dict(records.numbers), dict(records.categories)
    for column in columns:
        name, rare = column.name, data.rare_of(column)
        if column.type == "number":
            numbers[name] = _without_few(numbers[name], rare)
        elif few := rare_values(categories[name], rare, listed=not column.is_learned):
            if column.is_learned and not data.other:
                raise _refusal(column, len(few), rare)
            categories[name] = _fold(categories[name], few) if column.is_learned else _drop(categories[name], few)
    return replace(records, numbers=numbers, categories=categories)


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
    folded = fold_rare_values(records, data, columns)
    learned = [each for each in columns if each.is_learned]
    notes = [_low_rare_note(each, data.rare_of(each)) for each in learned if data.rare_of(each) < RARE]
    notes += [
        _rare_note(column, records.categories[column.name], few, data.rare_of(column))
        for column in learned
        if (few := rare_values(records.categories[column.name], data.rare_of(column)))
    ]
    if private:
        return tuple(notes)
    return (*notes, *_missing_notes(records, folded, data, columns), *_exposed_notes(folded, data, columns))


def list_columns(counts: Mapping[str, int]) -> str:
    """Return columns with their numbers of records: "'age' (3 records)"."""
    shown = [f"{name!r} ({records_text(count)})" for name, count in list(counts.items())[:MAX_SHOWN]]
    more = [f"and {len(counts) - MAX_SHOWN} more columns"] if len(counts) > MAX_SHOWN else []
    return ", ".join([*shown, *more])


def _missing_notes(
    records: TabularDataset, folded: TabularDataset, data: Data, columns: Sequence[Column]
) -> Iterator[str]:
    """Yield notes about values that count as missing; no note names one of them."""
    listed: dict[str, int] = {}
    few: dict[str, int] = {}
    differ: dict[str, int] = {}
    for column in columns:
        name = column.name
        if column.type == "category":
            listed[name] = folded.categories[name].missing - records.categories[name].missing
        else:
            dropped = _present(records.numbers[name]) - _present(folded.numbers[name])
            (differ if _present(folded.numbers[name]) else few)[name] = dropped
    for counts, fact in (
        (listed, f"values of listed categories that fewer than {data.rare} of our records have"),
        (few, f"numbers of columns in which we have fewer than {data.rare}, or so few that differ,"),
        (differ, f"numbers that fewer than {data.rare} of our records have, where all others have the same one,"),
    ):
        if counts := {name: count for name, count in counts.items() if count}:
            yield f"{fact} count as missing, because sums could disclose them: {list_columns(counts)}"


def _exposed_notes(records: TabularDataset, data: Data, columns: Sequence[Column]) -> Iterator[str]:
    """Yield notes about what others may read although, or because, `rare` is what it is."""
    if data.rare < RARE:
        whose = "a single record" if data.rare == 1 else f"{data.rare} records"
        yield (
            f"rare is {data.rare}, and {RARE} is the default: from sums about {whose}, such as the mean of few numbers "
            "or the gradient of a category, others may read values of these records, or all of them"
        )
    few = {each.name: _present(records.numbers[each.name]) for each in columns if each.type == "number"}
    if few := {name: count for name, count in few.items() if 0 < count < RARE}:
        yield f"others may read our numbers from the opened mean and deviation: {list_columns(few)}"
    if records.target is not None and not isinstance(records.target, Categorical):
        count = int(np.count_nonzero(differing(records.target)))
        if 0 < count < RARE:
            yield (
                f"all but {records_text(count)} have the same value of {data.target!r}: others may read the rest from "
                "the opened mean and deviation"
            )


def _low_rare_note(column: Column, rare: int) -> str:
    which = "every value" if rare == 1 else f"every value of {rare} records or more"
    return f"column {column.name!r}: rare is {rare}, so others learn {which} that another participant has, or guesses"


def _present(values: npt.NDArray[np.float64]) -> int:
    return int(np.count_nonzero(~np.isnan(values)))


def _without_few(values: npt.NDArray[np.float64], rare: int) -> npt.NDArray[np.float64]:
    """Return numbers without those that fewer than `rare` records have: all of them, or all but equal ones."""
    few = differing(values)
    if 0 < np.count_nonzero(few) < rare:
        values = np.where(few, np.nan, values)
    return np.full(len(values), np.nan) if 0 < _present(values) < rare else values


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


def _drop(values: Categorical, few: Mapping[str, int]) -> Categorical:
    codes = [MISSING_CODE if name in few else place for place, name in enumerate(values.names)]
    return Categorical(np.array([*codes, MISSING_CODE], dtype=np.int32)[values.codes], values.names)


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
