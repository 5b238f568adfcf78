"""What can be said of a training before anybody hears of us: whether its setting is one that the audit shows to leak.

The network is known from the federation file but for its inputs: how many categories a column has, and whether values
are missing, only all members together know. So the inputs are counted as few as they can be, and every caution here
holds. The optimiser gives them again, with all figures, when the records have been counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cgd.optim.privacy_warnings import FirstLayer, cautions

if TYPE_CHECKING:
    from cgd.federation.config import Federation
    from cgd.optim.privacy_warnings import PrivacyWarning
    from cgd.tabular.dataset import TabularDataset
    from cgd.tabular.settings import TabularSettings


def foreseen(federation: Federation, setting: TabularSettings, records: TabularDataset) -> tuple[PrivacyWarning, ...]:
    """The cautions of a participant with these records; of a network of the user's own nothing is known yet."""
    model = setting.model
    if model.kind == "custom":
        return ()
    inputs = sum(max(1, len(column.categories)) for column in setting.own_columns)
    # Of classes that the file does not list there are two at least.
    outputs = 1 if setting.data.task == "regression" else max(2, len(setting.data.classes))
    units = model.layers[0] if model.layers else outputs
    relu = bool(model.layers) and model.activation == "relu"
    members = federation.grid.rows if setting.in_columns and federation.grid else len(federation.names)
    return cautions(records.rows, FirstLayer(inputs, units, relu=relu, alone=not model.layers), members=members)
