"""Messages and notes about classes and categories that were learned by secure sums, printed before the first step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cgd.federation.data_schema import OTHER
from cgd.federation.toml_validation import similar
from cgd.tabular.federated_stats import CategoryStats
from cgd.tabular.rare_values import is_mostly_other, rare_values, records_text, value_counts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from cgd.federation.data_schema import Column
    from cgd.tabular.columns import Categorical
    from cgd.tabular.dataset import TabularDataset
    from cgd.tabular.preprocessing import Preprocessing
    from cgd.tabular.settings import TabularSettings

MAX_SHOWN = 12


def learned_messages(settings: TabularSettings, preprocessing: Preprocessing, records: TabularDataset) -> list[str]:
    """Return messages about the classes and categories that were learned, for the user to check before training."""
    data, messages = settings.data, []
    if preprocessing.classes and not data.classes:
        target = preprocessing.target
        messages.append(
            f"classes of {data.target!r}, learned: {_list(zip(target.classes, target.counts, strict=True))}"
        )
    for column, found, values in _learned_columns(settings, preprocessing, records):
        folded = _folded(found, values, data.rare_of(column))
        count = "1 value of ours counts" if len(folded) == 1 else f"{len(folded)} values of ours count"
        ours = f"; {count} as {OTHER!r} ({records_text(sum(folded.values()))})" if folded else ""
        listed = _list(zip(found.categories, found.counts, strict=True)) or "no value anywhere"
        messages.append(f"categories of {column.name!r}, learned: {listed}{ours}")
    return messages


def other_notes(settings: TabularSettings, preprocessing: Preprocessing, records: TabularDataset) -> tuple[str, ...]:
    """Return notes about learned columns in which most of our own values count as "other", for us alone.

    There is none if rare values alone are the reason, about which a note was printed before anything was sent
    (`cgd.tabular.rare_values`), or if the values of all members are "other", which is a note of the statistics.
    """
    notes = []
    for column, found, values in _learned_columns(settings, preprocessing, records):
        rare = settings.data.rare_of(column)
        folded = _folded(found, values, rare)
        told = found.categories == (OTHER,) or is_mostly_other(values, rare_values(values, rare))
        if is_mostly_other(values, folded) and not told:
            present = len(values.codes) - values.missing
            alike = [f"{name!r}{like}" for name in folded if (like := similar(name, found.categories))]
            spelling = f"Some are spelled like others: {', '.join(alike[:MAX_SHOWN])}. " if alike else ""
            notes.append(
                f"column {column.name!r}: {sum(folded.values()):,} of our {present:,} values count as {OTHER!r}, so "
                "the column says nothing about most of our records: no other participant has enough records of these "
                f"values. {spelling}If others spell them differently, agree on one spelling, or state in `values` what "
                "each means; if not, list the categories, or leave the column out. Only you see this note"
            )
    return tuple(notes)


def _learned_columns(
    settings: TabularSettings, preprocessing: Preprocessing, records: TabularDataset
) -> Iterator[tuple[Column, CategoryStats, Categorical]]:
    """Yield the columns whose categories were learned, with their statistics and our values."""
    stats = {each.name: each for each in preprocessing.columns if isinstance(each, CategoryStats)}
    for column in settings.own_columns:
        if column.is_learned:
            yield column, stats[column.name], records.categories[column.name]


def _folded(found: CategoryStats, values: Categorical, rare: int) -> dict[str, int]:
    """Return our values that count as "other": the rare ones, and those that nobody else has with enough records."""
    few = rare_values(values, rare)
    return few | {name: n for name, n in value_counts(values).items() if name not in {*found.categories, *few}}


def _list(counts: Iterable[tuple[str, int]]) -> str:
    pairs = list(counts)
    shown = pairs if len(pairs) <= MAX_SHOWN else sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[: MAX_SHOWN - 2]
    more = f" and {len(pairs) - len(shown)} more" if len(shown) < len(pairs) else ""
    return ", ".join(f"{name!r} ({count:,})" for name, count in shown) + more
