"""The settings of one participant's training on a table, from the federation file."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cgd.errors import InputError
from cgd.optim.flat_vectors import CPU
from cgd.secagg.reduction import MIN_MEMBERS

if TYPE_CHECKING:
    import torch

    from cgd.dp.settings import PrivacySettings
    from cgd.federation.config import Federation, Training
    from cgd.federation.data_schema import Column, Data
    from cgd.federation.model_section import Model
    from cgd.federation.privacy_section import PrivacySection


@dataclass(frozen=True)
class TabularSettings:
    """Data, model and training settings, and this participant's part of the columns.

    Attributes:
        data: the schema of the tables.
        model: the architecture.
        training: the training settings.
        column: in a grid with several columns, our grid column.
        columns: number of grid columns; 1 if every participant holds all columns of the table.
        privacy: differential privacy, if wanted.
        device: where our models are trained, which is our own choice.
        quorum: the least number of members of a sum, if members may be absent.
        salt: the secret of our row, with which IDs are hashed for an intersection; empty if there is none.

    Raises:
        InputError: the device is not the CPU, with differential privacy.
    """

    data: Data
    model: Model
    training: Training
    column: int = 0
    columns: int = 1
    privacy: PrivacySection | None = None
    device: torch.device = CPU
    quorum: int | None = None
    salt: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        if self.privacy is not None and self.device != CPU:
            raise InputError(
                f"device is {str(self.device)!r} and the federation has [privacy]; the noise is proven for gradients "
                "whose bits do not depend on other records, which is tested on the CPU only: leave the device out"
            )

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
            privacy, quorum = federation.privacy, federation.quorum
            return cls(federation.data, federation.model, federation.training, privacy=privacy, quorum=quorum)
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
        """The columns of numbers and categories that this participant holds; a date becomes several."""
        held = self.data.columns if self.columns == 1 else self.data.held_by(self.column)
        return tuple(part for each in held for part in each.input_columns)

    @property
    def vertical(self) -> bool:
        """True if other participants hold other columns of the same records (vertical partitioning)."""
        return self.columns > 1

    @property
    def looks(self) -> int:
        """With differential privacy, how many times the validation loss is opened: once, or for early stopping."""
        if not self.data.validation:
            return 0
        return math.ceil(self.training.steps / self.training.validate_every) if self.training.patience else 1

    @property
    def unit(self) -> str:
        """The column that names the unit of privacy of a record; empty if every record is one, or without privacy."""
        return "" if self.privacy is None else self.privacy.unit

    def privacy_settings(self) -> PrivacySettings:
        """Return the settings of differential privacy.

        Raises:
            InputError: there are none.
        """
        if self.privacy is None:
            raise InputError("the federation file has no [privacy]; add it")
        return self.privacy.settings(self.training.steps, self.looks, self.quorum)
