"""What a participant is to train, as its federation file says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cgd.errors import InputError
from cgd.secagg.partition import MIN_MEMBERS

if TYPE_CHECKING:
    from cgd.federation.config import Federation, Training
    from cgd.federation.data_schema import Column, Data, Model


@dataclass(frozen=True)
class TabularSettings:
    """What is learned, how, and which part of the columns is ours.

    Attributes:
        data: the tables.
        model: from what.
        training: how.
        column: in a grid with several columns, the one that we are in.
        columns: how many the grid has; 1 if everybody has all columns of the table.
    """

    data: Data
    model: Model
    training: Training
    column: int = 0
    columns: int = 1

    @classmethod
    def of(cls, federation: Federation, participant: str) -> TabularSettings:
        """What a participant of a federation is to train.

        Raises:
            InputError: the file does not say, or says what cannot be.
        """
        if federation.data is None or federation.model is None:
            raise InputError(
                f"{federation.path} has no [data] and [model], so it does not say what to learn from a table; add them "
                "(`cgd schema FILE --label COLUMN` suggests some), or train with a program of your own (--run)"
            )
        grid, cell = federation.grid, federation.participant(participant).cell
        setting = cls(federation.data, federation.model, federation.training)
        if grid is None or cell is None or grid.columns == 1:
            return setting
        minimum = federation.training.minimum
        if grid.columns < minimum:
            because = "hides nothing" if minimum == MIN_MEMBERS else "is ruled out by minimum in [training]"
            raise InputError(
                f"the grid has {grid.columns} columns; for a prediction a row adds up what its members say, and a sum "
                f"over fewer than {minimum} {because}: cut the table into more columns"
            )
        return cls(federation.data, federation.model, federation.training, cell.column, grid.columns)

    @property
    def own_columns(self) -> tuple[Column, ...]:
        """The columns of the table that are ours."""
        return self.data.columns if self.columns == 1 else self.data.held_by(self.column)

    @property
    def in_columns(self) -> bool:
        """Whether others have other columns of the same records."""
        return self.columns > 1
