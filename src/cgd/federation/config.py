"""The federation file: who takes part, where each is found, and how they train.

Every participant holds the same file. What counts is its content: comments and the order of keys and participants are
free, and the members compare a digest of every section (`Federation.sections`) before anything is summed. A change
raises the epoch by one, so that nobody goes on under an old file unnoticed.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cgd.errors import InputError, MembershipError
from cgd.federation.data_schema import Data, Model, parse_data, parse_model
from cgd.federation.keys import HubSite, Participant, check_name, check_unique, curve_key, public_keys, similar
from cgd.federation.toml_validation import at, check_keys, check_values, digest, typed
from cgd.files import parse_toml, read_text
from cgd.optim.grid import Grid
from cgd.peers import SumSettings
from cgd.secagg.federation_spec import FederationSpec
from cgd.secagg.fixed_point import FixedPoint
from cgd.secagg.messages import HUB
from cgd.secagg.partition import MIN_MEMBERS
from cgd.transport.connections import Contact

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from cgd.secagg.messages import Opening, Sharing

__all__ = ["Federation", "HubSite", "Participant", "Training"]

OPTIMIZERS = ("sgd", "adam")


@dataclass(frozen=True)
class Training:
    """How the members train; the same for all of them. What makes no sense raises an `InputError`.

    Attributes:
        steps: how many.
        lr: α, the step size.
        mu: μ, by which it shrinks.
        bound: see `SumSettings`, as for the next four.
        ring_bits: 32 or 64.
        sharing: "expanded" or "uniform".
        opening: "mesh", "aggregator" or "hub".
        aggregator: the name of that participant.
        minimum: no sum has fewer members than this, of a column or a row neither.
        optimizer: "sgd" or "adam".
        momentum: of "sgd".
        validate_every: with tables, how many steps lie between two looks at the validation loss.
        patience: with tables, how many looks without a better one end the training; 0 never ends it.
    """

    steps: int = 200
    lr: float = 0.5
    mu: float = 0.0
    bound: float = 16.0
    ring_bits: int = 32
    sharing: Sharing = "expanded"
    opening: Opening = "mesh"
    aggregator: str = ""
    minimum: int = MIN_MEMBERS
    optimizer: str = "sgd"
    momentum: float = 0.0
    validate_every: int = 10
    patience: int = 5

    def __post_init__(self) -> None:
        for each in fields(self):
            # A whole number becomes a float where a float is meant: equal files have equal digests.
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
            raise InputError(f"momentum is {self.momentum}; it is from 0 to below 1")
        if self.validate_every < 1 or self.patience < 0:
            raise InputError(
                f"validate_every is {self.validate_every} and patience {self.patience}; they are at least 1 and 0"
            )
        if self.minimum < MIN_MEMBERS:
            raise InputError(
                f"minimum is {self.minimum}; a sum over fewer than {MIN_MEMBERS} members hides nothing, raise it"
            )
        _ = self.settings  # refuses what cannot be

    @property
    def settings(self) -> SumSettings:
        """How the members sum."""
        return SumSettings(self.bound, self.ring_bits, self.sharing, self.opening, self.aggregator)


FOR_TABLES = Training(steps=300, lr=0.01, optimizer="adam")
"""What trains networks on tables well in most cases."""


@dataclass(frozen=True)
class Federation:
    """What the federation file says. What could not be summed safely raises an `InputError`.

    Attributes:
        name: of the federation.
        epoch: counts the changes of the file, from 1.
        training: how the members train.
        participants: all of them, by name.
        path: where the file is.
        hub: where it is and how it is known, if there is one.
        data: with `cgd join --data`, what the tables hold and what is to be predicted.
        model: from what.
    """

    name: str
    epoch: int
    training: Training
    participants: tuple[Participant, ...]
    path: Path = field(compare=False)
    hub: HubSite | None = None
    data: Data | None = None
    model: Model | None = None

    def __post_init__(self) -> None:
        check_name("name", self.name)
        if not 1 <= typed("epoch", self.epoch, int) < 2**63:
            raise InputError(f"epoch is {self.epoch}; it counts the changes of this file, from 1")
        object.__setattr__(self, "participants", tuple(sorted(self.participants, key=lambda each: each.name)))
        check_unique("name", self.participants, lambda each: each.name)
        check_unique("key", self.participants, lambda each: public_keys(each.key).agreement)
        check_unique("key", self.participants, lambda each: public_keys(each.key).signing)
        check_unique("address", [each for each in self.participants if each.address], lambda each: each.place)
        self._check_hub()
        count, minimum = len(self.participants), self.training.minimum
        if count < minimum:
            because = "a sum over fewer hides nothing" if minimum == MIN_MEMBERS else "minimum in [training]"
            raise InputError(
                f"there are {count} participants, and at least {minimum} are needed ({because}); add {minimum - count}"
            )
        bound, ring_bits = self.training.bound, self.training.ring_bits
        FixedPoint.for_weighted_sum(addends=count, bound=bound, ring_bits=ring_bits)  # refuses what does not fit
        aggregator = self.training.aggregator
        if aggregator and aggregator not in self.names:
            raise InputError(
                f"aggregator is {aggregator!r}{similar(aggregator, self.names)}, which is no participant; "
                f"name one of {', '.join(self.names)}"
            )
        self._check_grid()
        if (self.data is None) != (self.model is None):
            raise InputError("[data] and [model] go together; write both, or none and train with a program of your own")
        if self.data is not None:
            with at("[data] "):
                self.data.check_grid(self.grid.columns if self.grid is not None else 0)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Federation:
        """Read a federation file.

        Raises:
            InputError: it cannot be read, or not be used; the message says where and what to do.
        """
        return cls.parse(read_text(Path(path)), Path(path))

    @classmethod
    def parse(cls, text: str, path: Path) -> Federation:
        """What this text of a federation file says; `path` is for messages. Errors are as for `load`."""
        try:
            content = parse_toml(text)
        except (ValueError, RecursionError) as error:  # not only TOMLDecodeError: a number may have too many digits
            raise InputError(f"{path} is not TOML: {error}; mend it there") from None
        with at(f"{path}: "):
            check_values(content)
            check_keys(content, ("name", "epoch", "participants"), ("training", "hub", "data", "model"))
            with at("[training] "):
                table = content.get("training", {})
                check_keys(table, (), [each.name for each in fields(Training)])
                training = Training(**table)
            with at("[data] "):
                data = parse_data(content["data"]) if "data" in content else None
            with at("[model] "):
                model = parse_model(content["model"]) if "model" in content else None
            if not isinstance(content["participants"], list):
                raise InputError("participants is no list; write [[participants]] for each of them, in double brackets")
            participants = tuple(_participant(*each) for each in enumerate(content["participants"], start=1))
            hub = _hub(content["hub"]) if "hub" in content else None
            return cls(content["name"], content["epoch"], training, participants, path, hub, data, model)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all participants, in order."""
        return tuple(each.name for each in self.participants)

    @property
    def settings(self) -> SumSettings:
        """How the members sum."""
        return self.training.settings

    @property
    def contacts(self) -> dict[str, Contact]:
        """Where every participant is found and how it is known."""
        return {each.name: Contact(each.address, curve_key(each.key)) for each in self.participants}

    @property
    def contacts_and_hub(self) -> dict[str, Contact]:
        """The same, and the hub under its name, if there is one."""
        hub = {} if self.hub is None else {HUB: Contact(self.hub.address, curve_key(self.hub.key))}
        return self.contacts | hub

    @property
    def grid(self) -> Grid | None:
        """The grid that the cells make, if there are any."""
        cells = [each.cell for each in self.participants if each.cell is not None]
        return Grid(*(1 + max(places) for places in zip(*cells, strict=True))) if cells else None

    def groups(self) -> dict[str, tuple[str, ...]]:
        """Who sums together, by the name of the group.

        "everyone" does; in a grid, also those of a column ("column-0", …), and those of a row ("row-0", …) if they are
        as many as `minimum` asks for.
        """
        groups = {"everyone": self.names}
        grid, cells = self.grid, [(each.name, each.cell) for each in self.participants if each.cell is not None]
        if grid is not None:
            for column in range(grid.columns):
                groups[f"column-{column}"] = tuple(name for name, cell in cells if cell.column == column)
            for row in range(grid.rows if grid.columns >= self.training.minimum else 0):
                groups[f"row-{row}"] = tuple(name for name, cell in cells if cell.row == row)
        return groups

    def sections(self) -> dict[str, str]:
        """A digest of every section. Of what it says, not of its text: comments and order do not matter."""
        sections = {
            "federation": digest(self.name),
            "training": digest(asdict(self.training)),
            "participants": digest([asdict(each) for each in self.participants]),
        }
        for name, section in (("hub", self.hub), ("data", self.data), ("model", self.model)):
            if section is not None:
                sections[name] = digest(asdict(section))
        return sections

    @property
    def digest(self) -> str:
        """A digest of everything, for people to compare."""
        return digest_of(self.epoch, self.sections())

    def federation_spec(self, version: str) -> FederationSpec:
        """What the members hold to under this file; `version` is that of the program."""
        keys = {each.name: public_keys(each.key) for each in self.participants}
        return FederationSpec(self.name, self.epoch, self.names, self.groups(), self.sections(), version, keys)

    def participant(self, name: str) -> Participant:
        """The participant of this name.

        Raises:
            MembershipError: there is none.
        """
        for each in self.participants:
            if each.name == name:
                return each
        names = ", ".join(self.names)
        raise MembershipError(
            f"{name!r} is no participant of {self.name}{similar(name, self.names)}; name one of {names}"
        )

    def _check_hub(self) -> None:
        away = [each.name for each in self.participants if not each.address]
        if self.hub is None:
            if away:
                raise InputError(
                    f"{away[0]} has no address, and there is no hub through which it could be reached; give it an "
                    "address, or add a [hub]"
                )
            if self.training.opening == "hub":
                raise InputError('opening in [training] is "hub", and there is none; add a [hub], or choose "mesh"')
            return
        for each in self.participants:
            if curve_key(each.key) == curve_key(self.hub.key):
                raise InputError(f"the hub has the key of {each.name}; it needs one of its own: `cgd keygen hub`")
            if each.address and each.place == self.hub.place:
                raise InputError(f"the hub and {each.name} have the same address, {each.address!r}; each has its own")

    def _check_grid(self) -> None:
        grid = self.grid
        if grid is None:
            return
        placed = {each.cell: each.name for each in self.participants if each.cell is not None}
        for each in self.participants:
            if each.cell is None:
                some = min(placed.values())
                raise InputError(f"{each.name} has no cell and {some} has one; give one to all or to none")
        check_unique("cell", self.participants, lambda each: each.cell)
        if grid.rows * grid.columns > len(placed):
            cells = ((row, column) for row in range(grid.rows) for column in range(grid.columns))
            hole = next(cell for cell in cells if cell not in placed)  # soon found, however huge the grid
            raise InputError(
                f"the cells make a grid of {grid.rows} × {grid.columns}, with nobody at {list(hole)}; "
                "the participants have to fill it, rows times columns, counted from 0"
            )
        if grid.rows < self.training.minimum:
            because = (
                "hides nothing" if self.training.minimum == MIN_MEMBERS else "is ruled out by minimum in [training]"
            )
            raise InputError(
                f"the grid has {grid.rows} row(s), and a sum over a column of fewer than {self.training.minimum} "
                f"{because}; add rows, or take the cells away"
            )


def digest_of(epoch: int, sections: Mapping[str, str]) -> str:
    """A digest of everything: of a file, or of what a peer says of its own."""
    return digest([epoch, dict(sections)])


def _participant(number: int, table: Any) -> Participant:
    name = table.get("name") if isinstance(table, dict) else None
    with at(f"participant {number} ({name!r}): " if isinstance(name, str) else f"participant {number}: "):
        check_keys(table, ("name", "key"), ("address", "cell"))
        return Participant(**{"address": ""} | table)


def _hub(table: Any) -> HubSite:
    with at("[hub] "):
        check_keys(table, ("address", "key"), ())
        return HubSite(**table)
