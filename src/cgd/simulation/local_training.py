"""The work of participants between two sums: a gradient of all or some of their records, or a local training."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cgd.errors import InputError
from cgd.optim.grid import Cell
from cgd.optim.minibatches import round_batches
from cgd.simulation.population import participant_seed

if TYPE_CHECKING:
    import numpy.typing as npt

    from cgd.simulation.population import Participants

    Indices = npt.NDArray[np.int64]


# As in a federation file: the batches of an epoch are drawn again in every round.
MAX_BATCHES, MAX_LOCAL_EPOCHS = 10_000, 1_000


@dataclass(frozen=True)
class LocalTraining:
    """The local training of every participant between two sums, as in federated averaging.

    In each round a participant trains its own model by gradient descent, as `torch.optim.SGD` does, with a new
    optimiser. Its update, the weights before minus the weights after, takes the place of the gradient in the sum.

    Attributes:
        epochs: number of passes over the participant's records in a round.
        batch: most records of a step; 0 for all. An epoch has ⌈n_l/batch⌉ steps, whose sizes differ by at most one.
        lr: step size of the local steps.
        momentum: momentum of the local steps; it begins at zero in every round.

    Examples:
        >>> LocalTraining(epochs=2, batch=10, lr=0.1).steps(samples=25)
        6
    """

    epochs: int = 1
    batch: int = 0
    lr: float = 0.1
    momentum: float = 0.0

    def __post_init__(self) -> None:
        for name, least in (("epochs", 1), ("batch", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise InputError(f"{name} of the local training is {value!r}; it must be a whole number from {least}")
        if self.epochs > MAX_LOCAL_EPOCHS:
            raise InputError(f"epochs of the local training is {self.epochs}; it must be at most {MAX_LOCAL_EPOCHS:,}")
        for name, end in (("lr", math.inf), ("momentum", 1.0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < end:
                raise InputError(f"{name} of the local training is {value!r}; it must be at least 0 and below {end:g}")
            object.__setattr__(self, name, float(value))  # equal settings have equal texts

    def as_json(self) -> dict[str, Any]:
        """Return the settings as plain data."""
        return asdict(self)

    def steps(self, samples: int) -> int:
        """Return the number of steps of a participant with this number of records in a round."""
        return self.epochs * self.batches(samples)

    def batches(self, samples: int) -> int:
        """Return the number of batches of a participant with this number of records in an epoch."""
        return math.ceil(samples / self.batch) if self.batch else 1


@dataclass(frozen=True)
class Work:
    """The records that participants use in each round.

    Attributes:
        batches: number of batches of an epoch, of which a round uses one; 1 for all records in every round.
        local: local training, which uses all records in every round; None to sum gradients.
    """

    batches: int = 1
    local: LocalTraining | None = None

    def __post_init__(self) -> None:
        if isinstance(self.batches, bool) or not isinstance(self.batches, int) or self.batches < 1:
            raise InputError(f"batches is {self.batches!r}; it is the number of batches in an epoch, at least 1")
        if self.batches > MAX_BATCHES:
            raise InputError(
                f"batches is {self.batches}; it is the number of batches in an epoch, at most {MAX_BATCHES:,}: a "
                "participant with fewer records uses one of them in each step"
            )
        if self.local is not None and not isinstance(self.local, LocalTraining):
            raise InputError(f"local is a {type(self.local).__name__}; pass LocalTraining(epochs=…, batch=…, lr=…)")
        if self.local is not None and self.batches > 1:
            raise InputError(
                f"batches is {self.batches} and there is a local training, which uses all records in every round; set "
                "the batch of the local training, or leave one of both out"
            )

    @property
    def is_full_gradient(self) -> bool:
        """True if every round sums the gradients of all records."""
        return self.batches == 1 and self.local is None

    def describe(self) -> dict[str, str]:
        """Describe the work for a checkpoint; nothing for full gradients, as in former versions."""
        return {} if self.is_full_gradient else {"work": repr(self)}

    def batches_of_row(self, participants: Participants, row: int, round_number: int) -> list[Indices]:
        """Return the batches of the members of a row in a round, drawn from the seed of the row's first member."""
        return self.batches_of(
            participant_seed(participants.seed, Cell(row, 0)), participants.samples[row], round_number
        )

    def batches_of(self, seed: bytes, samples: int, round_number: int) -> list[Indices]:
        """Return the batches of a participant in a round, counted from 0; see `cgd.optim.minibatches.round_batches`."""
        count, epochs = (self.batches, 0) if self.local is None else (self.local.batches(samples), self.local.epochs)
        return [np.array(batch) for batch in round_batches(seed, round_number, samples, count, epochs)]
