"""The records of Adult by occupation: organisations of different trades, whose records are of different kinds.

Each organisation has the persons of some occupations, and the columns that say something about the occupation are
removed: it, the class of work, and the education. So the fraction of high incomes goes from 9 % to 46 %, and the other
columns do not explain it: a model that fits all organisations together fits none of them well. One organisation has 100
records only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from cgd.experiments.organisations import SOURCES, Organisations

HELD_OUT_FRACTION = 1 / 3
OCCUPATION = "occupation"
REMOVED = (OCCUPATION, "workclass", "education", "education-num")


@dataclass(frozen=True)
class Trade:
    """The occupations of an organisation, and the largest number of its records that are used for training."""

    occupations: tuple[str, ...]
    max_records: int | None = None


TRADES = {
    "office-a": Trade(("Exec-managerial", "Prof-specialty")),
    "office-b": Trade(("Craft-repair", "Machine-op-inspct", "Transport-moving")),
    "office-c": Trade(("Adm-clerical", "Other-service")),
    "office-d": Trade(("Farming-fishing",)),
    "office-e": Trade(("Protective-serv",)),
    "office-f": Trade(("Tech-support",), max_records=100),
}


def split_by_trade(seed: int = 0) -> Organisations:
    """Return the tables of six organisations of different trades; the seed draws the held-out records of each.

    Raises:
        InputError: the files of Adult are not found.
    """
    source, random = SOURCES["adult"](), np.random.default_rng(seed)
    cells = np.concatenate([source.training, source.held_out])
    occupations = cells[:, source.data.names.index(OCCUPATION)]
    others = np.delete(cells, [source.data.names.index(each) for each in REMOVED], axis=1)
    columns = tuple(each for each in source.data.columns if each.name not in REMOVED)
    tables, held_out = {}, {}
    for name, trade in TRADES.items():
        own = random.permutation(np.flatnonzero(np.isin(occupations, trade.occupations)))
        count = round(HELD_OUT_FRACTION * len(own))
        held_out[name] = others[own[:count]]
        tables[name] = others[own[count:]][: trade.max_records]
    return Organisations(
        replace(source.data, columns=columns), tables, np.concatenate(list(held_out.values())), held_out
    )
