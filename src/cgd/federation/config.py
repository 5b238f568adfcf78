"""The federation file: the participants with their addresses and keys, and the settings of the training.

Every participant holds the same file. Members compare a digest of every section (`Federation.sections`) before the
first sum; comments and the order of keys and participants do not change a digest. Every change increases the epoch by
one, so that a participant with an old file is detected.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cgd.errors import InputError, MembershipError
from cgd.federation.absence_section import Absence, check_place, parse_absence
from cgd.federation.data_schema import Data, parse_data
from cgd.federation.keys import curve_key, decode_public_key
from cgd.federation.model_section import Model, parse_model
from cgd.federation.participants import HubSite, Participant, check_unique
from cgd.federation.privacy_section import PrivacySection, check_coverage, parse_privacy
from cgd.federation.toml_lines import at_line
from cgd.federation.toml_validation import (
    at,
    check_keys,
    check_name,
    check_values,
    digest,
    similar,
    typed,
    update_keys,
)
from cgd.federation.training_section import FOR_PRIVATE_TABLES, FOR_TABLES, RENAMED, Training
from cgd.files import parse_toml, read_text
from cgd.optim.grid import Grid
from cgd.secagg.federation_spec import FederationSpec
from cgd.secagg.fixed_point import FixedPoint
from cgd.secagg.messages import HUB
from cgd.secagg.reduction import MIN_MEMBERS
from cgd.transport.connections import Contact

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from cgd.peers import SumSettings

__all__ = ["FOR_PRIVATE_TABLES", "FOR_TABLES", "RENAMED", "Federation", "HubSite", "Participant", "Training"]

SECTIONS = ("training", "absence", "hub", "data", "model", "privacy")
"""The optional sections of the file."""


@dataclass(frozen=True)
class Federation:
    """The content of a federation file. Invalid or unsafe settings raise an `InputError`.

    Attributes:
        name: the name of the federation.
        epoch: the number of the file's version, from 1.
        training: the settings of the training.
        participants: all participants, sorted by name.
        path: the path of the file.
        hub: the address and key of the hub, if there is one.
        data: for `cgd join --data`, the columns of the tables and the target.
        model: for `cgd join --data`, the model.
        privacy: for `cgd join --data`, differential privacy, if wanted.
        absence: the quorum that goes on without silent members, if wanted.
    """

    name: str
    epoch: int
    training: Training
    participants: tuple[Participant, ...]
    path: Path = field(compare=False)
    hub: HubSite | None = None
    data: Data | None = None
    model: Model | None = None
    privacy: PrivacySection | None = None
    absence: Absence | None = None

    def __post_init__(self) -> None:
        check_name("name", self.name)
        if not 1 <= typed("epoch", self.epoch, int) < 2**63:
            raise InputError(f"epoch is {self.epoch}; it counts the versions of this file, from 1")
        object.__setattr__(self, "participants", tuple(sorted(self.participants, key=lambda each: each.name)))
        check_unique("name", self.participants, lambda each: each.name)
        check_unique("key", self.participants, lambda each: decode_public_key(each.key).agreement)
        check_unique("key", self.participants, lambda each: decode_public_key(each.key).signing)
        check_unique("address", [each for each in self.participants if each.address], lambda each: each.endpoint)
        self._check_hub()
        count, minimum = len(self.participants), self.training.minimum
        if count < minimum:
            because = "a sum over fewer hides nothing" if minimum == MIN_MEMBERS else "minimum in [training]"
            raise InputError(
                f"there are {count} participants, and at least {minimum} are needed ({because}); add {minimum - count}"
            )
        bound, ring_bits = self.training.bound, self.training.ring_bits
        FixedPoint.for_weighted_sum(addends=count, bound=bound, ring_bits=ring_bits)  # raises if the sum does not fit
        aggregator = self.training.aggregator
        if aggregator and aggregator not in self.names:
            raise InputError(
                f"aggregator is {aggregator!r}{similar(aggregator, self.names)}, which is not a participant; "
                f"name one of {', '.join(self.names)}"
            )
        self._check_grid()
        if (self.data is None) != (self.model is None):
            raise InputError(
                "[data] and [model] belong together; write both, or neither and train with a program of your own"
            )
        if self.data is not None:
            with at("[data] "):
                self.data.check_grid(self.grid.columns if self.grid is not None else 0)
        with at("[training] "):
            self.training.check_use(
                private=self.privacy is not None,
                vertical=self.grid is not None and self.grid.columns > 1,
                grid=self.grid is not None,
                fresh=self.model is not None and self.model.fresh_origins,
            )
        if self.absence is not None:
            with at("[absence] "):
                self.absence.check_members(count, minimum)
                self.absence.check_use(
                    epoch=self.epoch,
                    private=self.privacy is not None,
                    grid=self.grid is not None,
                    opening=self.training.opening,
                    delay=self.training.delay,
                )
        if self.privacy is not None:
            with at("[privacy] "):
                check_coverage(self.privacy, self.data, count, grid=self.grid is not None, quorum=self.quorum)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Federation:
        """Read a federation file.

        Raises:
            InputError: it cannot be read or used; the message names the place and the remedy.
        """
        return cls.parse(read_text(Path(path)), Path(path))

    @classmethod
    def parse(cls, text: str, path: Path) -> Federation:
        """Return the content of a federation file's text; `path` is for messages. Errors are as for `load`."""
        try:
            content = parse_toml(text)
        except (ValueError, RecursionError) as error:  # not only TOMLDecodeError: a number may have too many digits
            raise InputError(f"{path} is not TOML: {error}; correct it there") from None
        with at_line(path, text):
            check_values(content)
            if {"data", "model"} & {*content} and not {"name", "participants"} & {*content}:
                raise InputError("this is a schema; make a federation file of it with `cgd federation new --schema`")
            check_place(content)
            check_keys(content, ("name", "epoch", "participants"), SECTIONS)
            with at("[training] "):
                table = update_keys(content.get("training", {}), "training", RENAMED["training"])
                check_keys(table, (), [each.name for each in fields(Training)])
                # With noise, every look at the validation loss uses the budget: one look, unless the file says more.
                training = Training(**({"patience": 0} if "privacy" in content else {}) | table)
            with at("[data] "):
                data = parse_data(content["data"]) if "data" in content else None
            with at("[model] "):
                model = parse_model(content["model"]) if "model" in content else None
            with at("[privacy] "):
                privacy = parse_privacy(content["privacy"]) if "privacy" in content else None
            with at("[absence] "):
                absence = parse_absence(content["absence"]) if "absence" in content else None
            if not isinstance(content["participants"], list):
                raise InputError("participants is not a list; write [[participants]], in double brackets, for each")
            participants = tuple(_participant(*each) for each in enumerate(content["participants"], start=1))
            hub = _hub(content["hub"]) if "hub" in content else None
            name, epoch = content["name"], content["epoch"]
            return cls(name, epoch, training, participants, path, hub, data, model, privacy, absence)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all participants, sorted."""
        return tuple(each.name for each in self.participants)

    @property
    def settings(self) -> SumSettings:
        """The settings of a sum."""
        return self.training.settings

    @property
    def quorum(self) -> int | None:
        """The least number of members that go on together; None if every sum waits for all."""
        return None if self.absence is None else self.absence.quorum

    @property
    def patience(self) -> float:
        """The seconds of silence after which the others go on without a member; infinite without a quorum."""
        return math.inf if self.absence is None else self.absence.patience

    @property
    def contacts(self) -> dict[str, Contact]:
        """The address and the CURVE key of every participant."""
        return {each.name: Contact(each.address, curve_key(each.key)) for each in self.participants}

    @property
    def contacts_and_hub(self) -> dict[str, Contact]:
        """The address and the CURVE key of every participant, and of the hub if there is one."""
        hub = {} if self.hub is None else {HUB: Contact(self.hub.address, curve_key(self.hub.key))}
        return self.contacts | hub

    @property
    def grid(self) -> Grid | None:
        """The grid that the participants' cells form, if they have cells."""
        cells = [each.cell for each in self.participants if each.cell is not None]
        return Grid(*(1 + max(places) for places in zip(*cells, strict=True))) if cells else None

    def groups(self) -> dict[str, tuple[str, ...]]:
        """Return the members of every group that sums together, by the group's name.

        The groups are "everyone"; in a grid, every column ("column-0", …), and every row ("row-0", …) if rows have at
        least `minimum` members.
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
        """Return a digest of every section; it depends on the content, not on comments or order."""
        sections = {
            "federation": digest(self.name),
            "training": digest(self.training.as_stored()),
            "participants": digest([asdict(each) for each in self.participants]),
        }
        if self.data is not None:
            sections["data"] = digest(self.data.as_stored())
        if self.model is not None:
            sections["model"] = digest(self.model.as_stored())
        for name, section in (("hub", self.hub), ("privacy", self.privacy), ("absence", self.absence)):
            if section is not None:
                sections[name] = digest(asdict(section))
        return sections

    @property
    def digest(self) -> str:
        """The digest of the whole file, for people to compare."""
        return digest_of(self.epoch, self.sections())

    def federation_spec(self, version: str) -> FederationSpec:
        """Return the specification that members must share to sum under this file; `version` is that of `cgd`."""
        keys = {each.name: decode_public_key(each.key) for each in self.participants}
        return FederationSpec(
            self.name, self.epoch, self.names, self.groups(), self.sections(), version, keys, self.quorum
        )

    def participant(self, name: str) -> Participant:
        """Return the participant of this name.

        Raises:
            MembershipError: there is none.
        """
        for each in self.participants:
            if each.name == name:
                return each
        names = ", ".join(self.names)
        raise MembershipError(
            f"{name!r} is not a participant of {self.name}{similar(name, self.names)}; name one of {names}"
        )

    def _check_hub(self) -> None:
        without_address = [each.name for each in self.participants if not each.address]
        if self.hub is None:
            if without_address:
                raise InputError(
                    f"{without_address[0]} has no address, and there is no hub through which to reach it; give it an "
                    "address, or add a [hub]"
                )
            if self.training.opening == "hub":
                raise InputError('opening in [training] is "hub", and there is no hub; add a [hub], or choose "mesh"')
            return
        for each in self.participants:
            if curve_key(each.key) == curve_key(self.hub.key):
                raise InputError(f"the hub has the key of {each.name}; it needs one of its own: `cgd keygen hub`")
            if each.address and each.endpoint == self.hub.endpoint:
                raise InputError(f"the hub and {each.name} have the same address, {each.address!r}; each needs its own")

    def _check_grid(self) -> None:
        grid = self.grid
        if grid is None:
            return
        names = {each.cell: each.name for each in self.participants if each.cell is not None}
        for each in self.participants:
            if each.cell is None:
                other = min(names.values())
                raise InputError(f"{each.name} has no cell and {other} has one; give one to all or to none")
        check_unique("cell", self.participants, lambda each: each.cell)
        if grid.rows * grid.columns > len(names):
            cells = ((row, column) for row in range(grid.rows) for column in range(grid.columns))
            empty = next(cell for cell in cells if cell not in names)  # found after at most len(names) cells
            raise InputError(
                f"the cells form a grid of {grid.rows} × {grid.columns}, in which {list(empty)} is empty; "
                "the participants must fill the grid, with rows and columns counted from 0"
            )
        if grid.rows < self.training.minimum:
            because = (
                "hides nothing" if self.training.minimum == MIN_MEMBERS else "is excluded by minimum in [training]"
            )
            raise InputError(
                f"the grid has {grid.rows} row(s), and a sum over a column of fewer than {self.training.minimum} "
                f"{because}; add rows, or remove the cells"
            )


def digest_of(epoch: int, sections: Mapping[str, str]) -> str:
    """Return the digest of a whole file from its epoch and its sections' digests, our own or a peer's."""
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
