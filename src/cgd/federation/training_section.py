"""The section `[training]` of the federation file: the settings of the training, equal for all members."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from cgd.errors import InputError
from cgd.federation.toml_validation import RenamedKey, typed, with_new_keys, with_old_keys
from cgd.optim.delayed_steps import check_delay
from cgd.peers import SumSettings
from cgd.secagg.reduction import MIN_MEMBERS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cgd.secagg.messages import Masking, Opening

OPTIMIZERS = ("sgd", "adam")
RENAMED = {"training": (RenamedKey("sharing", "masking", {"expanded": "pairwise"}),)}
"""Keys with a new name, by section; digests and stored files contain the old ones."""
# The batches of an epoch are drawn again in every step, and local epochs are trained between two sums.
MAX_BATCHES, MAX_LOCAL_EPOCHS = 10_000, 1_000
DEFAULTS: dict[str, Any] = {"batches": 1, "local_epochs": 0, "local_lr": 0.05, "delay": 0}
"""Keys that stored files and digests contain only if they have other values, as before there were such keys."""


@dataclass(frozen=True)
class Training:
    """The settings of the training, equal for all members. Invalid values raise an `InputError`.

    Attributes:
        steps: the number of steps.
        lr: α, the step size.
        mu: μ, the decay of the step size.
        bound: see `SumSettings`, as for the next four.
        ring_bits: 16, 32 or 64.
        masking: "pairwise" or "uniform".
        opening: "mesh", "aggregator" or "hub".
        aggregator: the name of the aggregator.
        minimum: the minimum number of members per sum, including row and column sums.
        optimizer: "sgd" or "adam".
        momentum: the momentum of "sgd".
        validate_every: with tables, the number of steps between two evaluations of the validation loss.
        patience: with tables, the number of evaluations without improvement before early stopping; 0 disables it.
        batches: with tables, the number of batches into which each member divides its records in an epoch; a step uses
            one of them. A member with fewer records than batches uses one record in each step.
        local_epochs: with tables, how many times a member trains on all its records between two sums, in `batches`
            batches; 0 sums gradients.
        local_lr: the step size of these local steps.
        delay: the number of steps after which the models move by a sum, see `cgd.optim.delayed_steps`.
    """

    steps: int = 200
    lr: float = 0.5
    mu: float = 0.0
    bound: float = 16.0
    ring_bits: int = 32
    masking: Masking = "pairwise"
    opening: Opening = "mesh"
    aggregator: str = ""
    minimum: int = MIN_MEMBERS
    optimizer: str = "sgd"
    momentum: float = 0.0
    validate_every: int = 10
    patience: int = 5
    batches: int = DEFAULTS["batches"]
    local_epochs: int = DEFAULTS["local_epochs"]
    local_lr: float = DEFAULTS["local_lr"]
    delay: int = DEFAULTS["delay"]

    def __post_init__(self) -> None:
        for each in fields(self):
            # An int becomes a float where a float is expected, so that equal settings have equal digests.
            object.__setattr__(self, each.name, typed(each.name, getattr(self, each.name), type(each.default)))
        if self.steps < 1:
            raise InputError(f"steps is {self.steps}; train for at least 1")
        if not 0 < self.lr < math.inf:
            raise InputError(f"lr is {self.lr}; it must be a positive, finite number")
        if not 0 <= self.mu < math.inf:
            raise InputError(f"mu is {self.mu}; it must be a finite number, at least 0 (for a fixed step size)")
        if self.optimizer not in OPTIMIZERS:
            raise InputError(f"optimizer is {self.optimizer!r}; choose one of {', '.join(OPTIMIZERS)}")
        if not 0 <= self.momentum < 1:
            raise InputError(f"momentum is {self.momentum}; it must be at least 0 and below 1")
        if self.validate_every < 1 or self.patience < 0:
            raise InputError(
                f"validate_every is {self.validate_every} and patience {self.patience}; they must be at least 1 and 0"
            )
        for name, least, most in (("batches", 1, MAX_BATCHES), ("local_epochs", 0, MAX_LOCAL_EPOCHS)):
            if not least <= getattr(self, name) <= most:
                raise InputError(f"{name} is {getattr(self, name)}; it must be at least {least} and at most {most:,}")
        if not 0 < self.local_lr < math.inf:
            raise InputError(f"local_lr is {self.local_lr}; it must be a positive, finite number")
        check_delay(self.delay, self.steps)
        if self.minimum < MIN_MEMBERS:
            raise InputError(
                f"minimum is {self.minimum}; a sum over fewer than {MIN_MEMBERS} members hides nothing, raise it"
            )
        _ = self.settings  # raises if they are invalid

    @property
    def settings(self) -> SumSettings:
        """The settings of a sum."""
        return SumSettings(self.bound, self.ring_bits, self.masking, self.opening, self.aggregator)

    def check_use(self, *, private: bool, vertical: bool, grid: bool, fresh: bool) -> None:
        """Check that batches, local epochs, a delay and 16 bits are possible, and that no setting is without a use.

        Args:
            private: there is differential privacy.
            vertical: the members hold different columns.
            grid: the members have cells in a grid.
            fresh: the models have fresh origins.

        Raises:
            InputError: they are not.
        """
        if self.momentum and self.optimizer != "sgd":
            raise InputError(
                f"momentum is {self.momentum}, and optimizer is {self.optimizer!r}, which has a momentum of its own; "
                "write optimizer = 'sgd', or remove momentum"
            )
        used = [name for name in ("batches", "local_epochs") if getattr(self, name) != DEFAULTS[name]]
        if used and private:
            raise InputError(
                f"{used[0]} is {getattr(self, used[0])}, and there is a [privacy]: its noise is for gradients of all "
                f"records; remove {used[0]}, or [privacy]"
            )
        if self.ring_bits == 16 and private:
            raise InputError(
                "ring_bits is 16, and there is a [privacy]: its noise is proved for 32 and 64 bits; use one of those"
            )
        if used and vertical:
            raise InputError(
                f"{used[0]} is {getattr(self, used[0])}, and the participants hold different columns: the members of a "
                f"row must train on the same records in every step; remove {used[0]}"
            )
        if self.delay and fresh:
            raise InputError(
                f"delay is {self.delay}, and [model] has fresh_origins: a gradient would be that of a step before, at "
                "the origin of another one; remove one of the two"
            )
        if self.delay and grid:
            raise InputError(
                f"delay is {self.delay}, and the participants form a grid: a step has a sum of each column and one of "
                "all, which are opened together or not at all, and a row cannot go on without its own sums; remove "
                "delay, or the cells"
            )

    def written(self) -> dict[str, Any]:
        """Return the settings that a federation file states; some only if they are not the default."""
        return {name: value for name, value in asdict(self).items() if value != DEFAULTS.get(name)}

    def as_stored(self) -> dict[str, Any]:
        """Return the settings under the names that digests, `run.json` and recorded traces contain."""
        return with_old_keys(self.written(), RENAMED["training"])

    @classmethod
    def from_stored(cls, table: Mapping[str, Any]) -> Training:
        """Return the settings that `as_stored` gave; unknown keys, which another version may have, are ignored.

        Raises:
            InputError: a value is not valid.
        """
        current = with_new_keys(table, RENAMED["training"])
        return cls(**{each.name: current[each.name] for each in fields(cls) if each.name in current})


FOR_TABLES = Training(steps=300, lr=0.01, optimizer="adam")
"""Default settings for networks on tables."""
FOR_PRIVATE_TABLES = replace(FOR_TABLES, steps=200, lr=0.02, patience=0)
"""The same with differential privacy: fewer, larger steps with less noise each, and one look at the validation loss.

`benchmarks/accuracy/private_defaults.py` chooses them, on training records only.
"""
