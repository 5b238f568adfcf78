"""The settings of one participant's training on a table, from the federation file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cgd.errors import InputError
from cgd.secagg.reduction import MIN_MEMBERS

if TYPE_CHECKING:
    from cgd.federation.config import Federation, Training
    from cgd.federation.data_schema import Column, Data, Model


@dataclass(frozen=True)
class TabularSettings:
    """Data, model and training settings, and this participant's part of the columns.

    Attributes:
        data: the schema of the tables.
        model: the architecture.
        training: the training settings.
        column: in a grid with several columns, our grid column.
        columns: number of grid columns; 1 if every participant holds all columns of the table.
    """

    data: Data
    model: Model
    training: Training
    column: int = 0
    columns: int = 1

    @classmethod
    def from_federation(cls, federation: Federation, participant: str) -> TabularSettings:
        """Return the settings of a participant.

        Raises:
            InputError: the federation file has no [data] and [model], or its grid has too few columns.
        """
        if federation.data is None or federation.model is None:
            raise InputError(
                f"{federation.path} has no [data] and [model], so it does not describe what to learn from a table; add "
                "them (`cgd schema FILE --label COLUMN` suggests some), or train with a program of your own (--run)"
            )
        grid, cell = federation.grid, federation.participant(participant).cell
        if grid is None or cell is None or grid.columns == 1:
            return cls(federation.data, federation.model, federation.training)
        minimum = federation.training.minimum
        if grid.columns < minimum:
            reason = "hides nothing" if minimum == MIN_MEMBERS else "is excluded by minimum in [training]"
            raise InputError(
                f"the grid has {grid.columns} columns; a prediction sums the outputs of a row's members, and a sum "
                f"over fewer than {minimum} {reason}: divide the table into more columns"
            )
        return cls(federation.data, federation.model, federation.training, cell.column, grid.columns)

    @property
    def own_columns(self) -> tuple[Column, ...]:
        """The columns of the table that this participant holds."""
        return self.data.columns if self.columns == 1 else self.data.held_by(self.column)

    @property
    def vertical(self) -> bool:
        """True if other participants hold other columns of the same records (vertical partitioning)."""
        return self.columns > 1
