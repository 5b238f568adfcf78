"""Messages about classes and categories that were learned by secure sums, to be read before the first step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cgd.federation.data_schema import OTHER
from cgd.tabular.federated_stats import CategoryStats
from cgd.tabular.rare_values import rare_values, records_text, value_counts

if TYPE_CHECKING:
    from collections.abc import Iterable

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
    stats = {each.name: each for each in preprocessing.columns if isinstance(each, CategoryStats)}
    for column in settings.own_columns:
        if column.is_learned:
            found, values = stats[column.name], records.categories[column.name]
            few = rare_values(values, data.rare_of(column))
            alone = {name: n for name, n in value_counts(values).items() if name not in {*found.categories, *few}}
            folded = few | alone
            count = "1 value of ours counts" if len(folded) == 1 else f"{len(folded)} values of ours count"
            ours = f"; {count} as {OTHER!r} ({records_text(sum(folded.values()))})" if folded else ""
            listed = _list(zip(found.categories, found.counts, strict=True)) or "no value anywhere"
            messages.append(f"categories of {column.name!r}, learned: {listed}{ours}")
    return messages


def _list(counts: Iterable[tuple[str, int]]) -> str:
    pairs = list(counts)
    shown = pairs if len(pairs) <= MAX_SHOWN else sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[: MAX_SHOWN - 2]
    more = f" and {len(pairs) - len(shown)} more" if len(shown) < len(pairs) else ""
    return ", ".join(f"{name!r} ({count:,})" for name, count in shown) + more
