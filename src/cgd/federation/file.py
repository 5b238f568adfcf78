"""The federation file: who takes part, where each is found, and how they train.

Every participant holds the same file. What counts is its content: comments and the order of keys and participants are
free, and the members compare a digest of every section (`Federation.sections`) before anything is summed. A change
raises the epoch by one, so that nobody goes on under an old file unnoticed.
"""

from __future__ import annotations

import difflib
import hashlib
import ipaddress
import itertools
import json
import math
import os
import re
import stat
import tempfile
import tomllib
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomlkit
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import AoT, Array, Comment, Null, Table, Whitespace

from cgd.errors import InputError, MembershipError
from cgd.federation.keys import KEY_CHARACTERS, check_name, is_key, write_new
from cgd.learning.grid import Cell, Grid
from cgd.network.peers import SumSettings
from cgd.network.zeromq import Contact
from cgd.protocol.assembly import Charter
from cgd.protocol.members import FEWEST_MEMBERS
from cgd.ring.fixed_point import FixedPoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from cgd.protocol.messages import Opening, Sharing

DIGEST_DIGITS = 16
EVERYONE = "everyone"
LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
HOST = re.compile(rf"{LABEL}(\.{LABEL})*")
ADDRESS = re.compile(r"tcp://(\[[^\[\]]*\]|[^\[\]:/]+):([1-9][0-9]{0,4})")
KINDS = {int: "a whole number", float: "a number", str: "a text, in quotes"}


@dataclass(frozen=True)
class Training:
    """How the members train; the same for all of them.

    Attributes:
        steps: how many.
        lr: α, the step size.
        mu: μ, by which it shrinks.
        bound: see `SumSettings`, as for the next four.
        ring_bits: 32 or 64.
        sharing: "expanded" or "uniform".
        opening: "mesh" or "aggregator".
        aggregator: the name of that participant.
        minimum: there are never fewer members than this.

    Raises:
        InputError: a value is of the wrong type or makes no sense.
    """

    steps: int = 200
    lr: float = 0.5
    mu: float = 0.0
    bound: float = 16.0
    ring_bits: int = 32
    sharing: Sharing = "expanded"
    opening: Opening = "mesh"
    aggregator: str = ""
    minimum: int = FEWEST_MEMBERS

    def __post_init__(self) -> None:
        for each in fields(self):
            # A whole number becomes a float where a float is meant: equal files have equal digests.
            object.__setattr__(self, each.name, _typed(each.name, getattr(self, each.name), type(each.default)))
        if self.steps < 1:
            raise InputError(f"steps is {self.steps}; train for at least 1")
        if not 0 < self.lr < math.inf:
            raise InputError(f"lr is {self.lr}; it must be a positive, finite number")
        if not 0 <= self.mu < math.inf:
            raise InputError(f"mu is {self.mu}; it must be a finite number, at least 0 (for a constant step size)")
        if self.minimum < FEWEST_MEMBERS:
            raise InputError(
                f"minimum is {self.minimum}; a sum over fewer than {FEWEST_MEMBERS} members hides nothing, raise it"
            )
        _ = self.settings  # refuses what cannot be

    @property
    def settings(self) -> SumSettings:
        """How the members sum."""
        return SumSettings(self.bound, self.ring_bits, self.sharing, self.opening, self.aggregator)


@dataclass(frozen=True)
class Participant:
    """One participant, as all others know it.

    Attributes:
        name: what it is called.
        address: where others reach it, such as `tcp://hospital-a.example:7001`.
        key: its public key, 40 characters of Z85.
        cell: its place in the grid, if there is one.

    Raises:
        InputError: a value is of the wrong type or makes no sense.
    """

    name: str
    address: str
    key: str
    cell: Cell | None = None

    def __post_init__(self) -> None:
        check_name("name", self.name)
        host_and_port(self.address)
        if not is_key(_typed("key", self.key, str).encode()):
            raise InputError(
                f"key is {self.key!r}; a key is {KEY_CHARACTERS} characters of Z85: copy it from {self.name}.pub"
            )
        if self.cell is not None:
            cell: Any = self.cell
            whole = isinstance(cell, (list, tuple)) and all(type(each) is int and each >= 0 for each in cell)
            if not whole or len(cell) != 2:
                raise InputError(f"cell is {cell!r}; write the row and the column, from 0, such as cell = [0, 2]")
            object.__setattr__(self, "cell", Cell(*cell))


@dataclass(frozen=True)
class Federation:
    """What the federation file says.

    Attributes:
        name: of the federation.
        epoch: counts the changes of the file, from 1.
        training: how the members train.
        participants: all of them, by name.
        path: where the file is.

    Raises:
        InputError: it could not be summed safely like this.
    """

    name: str
    epoch: int
    training: Training
    participants: tuple[Participant, ...]
    path: Path = field(compare=False)

    def __post_init__(self) -> None:
        check_name("name", self.name)
        if not 1 <= _typed("epoch", self.epoch, int) < 2**63:
            raise InputError(f"epoch is {self.epoch}; it counts the changes of this file, from 1")
        object.__setattr__(self, "participants", tuple(sorted(self.participants, key=lambda each: each.name)))
        _check_unique("name", self.participants, lambda each: each.name)
        _check_unique("key", self.participants, lambda each: each.key)
        _check_unique("address", self.participants, lambda each: host_and_port(each.address))
        count, minimum = len(self.participants), self.training.minimum
        if count < minimum:
            because = "a sum over fewer hides nothing" if minimum == FEWEST_MEMBERS else "[training] has it so"
            raise InputError(
                f"there are {count} participants, and at least {minimum} are needed ({because}); add {minimum - count}"
            )
        bound, ring_bits = self.training.bound, self.training.ring_bits
        FixedPoint.for_weighted_sum(addends=count, bound=bound, ring_bits=ring_bits)  # refuses what does not fit
        self._check_grid()
        aggregator = self.training.aggregator
        if aggregator and aggregator not in self.names:
            raise InputError(
                f"aggregator is {aggregator!r}{_similar(aggregator, self.names)}, which is no participant; "
                f"name one of {', '.join(self.names)}"
            )
        odd = [group for group, members in self.groups().items() if aggregator not in members]
        if aggregator and odd:
            raise InputError(
                f'aggregator is {aggregator!r}, which is no member of {", ".join(odd)}; in this grid, use opening = "mesh"'
            )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Federation:
        """Read a federation file.

        Raises:
            InputError: it cannot be read, or not be used; the message says where and what to do.
        """
        return cls.parse(_read(Path(path)), Path(path))

    @classmethod
    def parse(cls, text: str, path: Path) -> Federation:
        """What this text of a federation file says; `path` is for messages."""
        try:
            content = tomllib.loads(text)
        except (ValueError, RecursionError) as error:  # not only TOMLDecodeError: a number may have too many digits
            raise InputError(f"{path} is not TOML: {error}; mend it there") from None
        with _at(f"{path}: "):
            _check_integers(content)
            _check_keys(content, ("name", "epoch", "participants"), ("training",))
            with _at("[training] "):
                table = content.get("training", {})
                _check_keys(table, (), [each.name for each in fields(Training)])
                training = Training(**table)
            if not isinstance(content["participants"], list):
                raise InputError("participants is no list; write [[participants]] for each of them, in double brackets")
            participants = tuple(_participant(*each) for each in enumerate(content["participants"], start=1))
            return cls(content["name"], content["epoch"], training, participants, path)

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
        return {each.name: Contact(each.address, each.key.encode()) for each in self.participants}

    @property
    def grid(self) -> Grid | None:
        """The grid that the cells make, if there are any."""
        cells = [each.cell for each in self.participants if each.cell is not None]
        return Grid(*(1 + max(places) for places in zip(*cells, strict=True))) if cells else None

    def groups(self) -> dict[str, tuple[str, ...]]:
        """Who sums together, by the name of the group.

        "everyone" does; in a grid, also those of a column ("column-0", …), and those of a row ("row-0", …) if they are
        enough for a sum that hides something.
        """
        groups = {EVERYONE: self.names}
        grid, cells = self.grid, [(each.name, each.cell) for each in self.participants if each.cell is not None]
        if grid is not None:
            for column in range(grid.columns):
                groups[f"column-{column}"] = tuple(name for name, cell in cells if cell.column == column)
            for row in range(grid.rows if grid.columns >= FEWEST_MEMBERS else 0):
                groups[f"row-{row}"] = tuple(name for name, cell in cells if cell.row == row)
        return groups

    def sections(self) -> dict[str, str]:
        """A digest of every section. Of what it says, not of its text: comments and order do not matter."""
        return {
            "federation": _digest(self.name),
            "training": _digest(asdict(self.training)),
            "participants": _digest([asdict(each) for each in self.participants]),
        }

    @property
    def digest(self) -> str:
        """A digest of everything, for people to compare."""
        return _digest([self.epoch, self.sections()])

    def charter(self, version: str) -> Charter:
        """What the members hold to under this file; `version` is that of the program."""
        return Charter(self.name, self.epoch, self.names, self.groups(), self.sections(), version)

    def participant(self, name: str) -> Participant:
        """The participant of this name.

        Raises:
            MembershipError: there is none.
        """
        for each in self.participants:
            if each.name == name:
                return each
        raise MembershipError(
            f"{name!r} is no participant of {self.name}{_similar(name, self.names)}; name one of {', '.join(self.names)}"
        )

    def _check_grid(self) -> None:
        placed = {each.cell: each.name for each in self.participants if each.cell is not None}
        grid, count = self.grid, sum(each.cell is not None for each in self.participants)
        if grid is None:
            return
        if count < len(self.participants):
            without = next(each.name for each in self.participants if each.cell is None)
            raise InputError(f"{without} has no cell and {min(placed.values())} has one; give one to all or to none")
        _check_unique("cell", self.participants, lambda each: each.cell)
        if grid.rows * grid.columns > count:
            cells = (Cell(*each) for each in itertools.product(range(grid.rows), range(grid.columns)))
            hole = next(cell for cell in cells if cell not in placed)  # lazily: a typing error can make a huge grid
            raise InputError(
                f"the cells make a grid of {grid.rows} × {grid.columns} with nobody at {list(hole)}; "
                "the participants have to fill it, rows times columns, counted from 0"
            )
        if grid.rows < FEWEST_MEMBERS:
            raise InputError(
                f"the grid has {grid.rows} row(s), and a sum over a column of fewer than {FEWEST_MEMBERS} hides nothing; "
                "add rows, or take the cells away"
            )


def new(
    path: str | os.PathLike[str], name: str, participants: Iterable[Participant], training: Training | None = None
) -> Federation:
    """Write the first file of a federation, with comments.

    Raises:
        InputError: it exists, cannot be written, or could not be used.
    """
    path = Path(path)
    with _at(f"{path} is not written: "):
        made = Federation(name, 1, training or Training(), tuple(participants), path)
    write_new(path, _text(made), 0o644)
    return made


def without(path: str | os.PathLike[str], name: str) -> Federation:
    """Take a participant out of the file. The epoch goes up by one, and comments stay.

    Raises:
        InputError: there is no such participant, or the rest could not be used; the file is as it was.
    """
    text = _read(Path(path))
    before = Federation.parse(text, Path(path))
    with _at(f"{path}: "):
        before.participant(name)
    rest = tuple(each for each in before.participants if each.name != name)
    return _rewrite(text, before, rest, f"without {name}", lambda entries: _drop(entries, name))


def with_participant(path: str | os.PathLike[str], participant: Participant) -> Federation:
    """Add a participant to the file. The epoch goes up by one, and comments stay.

    Raises:
        InputError: the whole could not be used, such as with a second one of that name; the file is as it was.
    """
    text = _read(Path(path))
    before = Federation.parse(text, Path(path))
    after = (*before.participants, participant)
    return _rewrite(text, before, after, f"with {participant.name}", lambda entries: _add(entries, participant))


def host_and_port(address: str) -> tuple[str, int]:
    """Where an address leads, written in one way only.

    Raises:
        InputError: it is no address that others can reach.

    Examples:
        >>> host_and_port("tcp://[2001:DB8:0::1]:7001")
        ('2001:db8::1', 7001)
    """
    found = ADDRESS.fullmatch(_typed("address", address, str))
    host = _host(found[1]) if found and int(found[2]) < 2**16 else None
    if found is None or host is None:
        raise InputError(
            f"address is {address!r}; write where the others reach it, tcp://HOST:PORT, with a port from 1 to 65535 and "
            "an IPv6 host in brackets, such as tcp://hospital-a.example:7001"
        )
    return host, int(found[2])


def _host(text: str) -> str | None:
    try:
        if text.startswith("["):
            ip: ipaddress.IPv4Address | ipaddress.IPv6Address = ipaddress.IPv6Address(text[1:-1])
        elif text.strip("0123456789."):
            return text.lower() if HOST.fullmatch(text) else None
        else:
            ip = ipaddress.IPv4Address(text)
    except ValueError:
        return None
    # Nobody can connect to 0.0.0.0, and a zone (%eth0) means something on one machine only.
    return None if ip.is_unspecified or "%" in text else str(ip)
