"""Records in the units of their table: the reverse of the encoding."""

from __future__ import annotations

import numpy as np
import torch

from cgd.audit.record_table import MISSING, UNCLEAR, RecordTable
from cgd.federation.data_schema import Column, Data
from cgd.local import solo_peers
from cgd.tabular.dataset import dataset_from_frame
from cgd.tabular.preprocessing import fit

COLUMNS = (Column("age", "number"), Column("platelets", "number"), Column("ward", "category", ("A", "B")))
FRAME = {
    "age": [61.5, None, 40.25, 33.0],
    "platelets": [250_000.0, 310_000.0, 198_000.0, 402_500.0],
    "ward": ["A", "B", None, "A"],
    "ill": ["no", "yes", "no", "yes"],
}


def encoded() -> tuple[RecordTable, torch.Tensor]:
    data = Data("ill", COLUMNS, rare=1)
    records, _ = dataset_from_frame(FRAME, data, COLUMNS, target=True)
    preprocessing = fit(records, data, COLUMNS, solo_peers())
    places = {"me": [f"row {place + 1}" for place in range(4)]}
    return RecordTable(places, preprocessing), torch.from_numpy(preprocessing.transform(records)[0]).double()


def test_decoded_values_are_those_of_the_table() -> None:
    table, x = encoded()
    assert table.columns == ["age", "platelets", "ward"]
    assert [table.decode(each) for each in x] == [
        ["61.5", "250000", "A"],
        [MISSING, "310000", "B"],
        ["40.25", "198000", MISSING],
        ["33", "402500", "A"],
    ]


def test_guess_has_the_nearest_values() -> None:
    table, x = encoded()
    assert table.decode(x[0] + 0.01)[2] == "A"
    assert table.decode(x[0] + 0.01) != table.decode(x[0])
    nothing = torch.zeros_like(x[0])
    assert table.decode(nothing)[2] == UNCLEAR
    assert table.decode(nothing * np.inf) == [UNCLEAR, UNCLEAR, UNCLEAR]
