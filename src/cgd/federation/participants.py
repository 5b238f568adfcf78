"""`Participant` and `HubSite`: the entries of the federation file for participants and for the hub."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cgd.errors import InputError
from cgd.federation.keys import check_key
from cgd.federation.toml_validation import check_name
from cgd.optim.grid import Cell
from cgd.transport.addresses import host_and_port

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable


@dataclass(frozen=True)
class Participant:
    """One participant, as listed in the federation file. Invalid values raise an `InputError`.

    Attributes:
        name: its name.
        address: where others connect to it, such as `tcp://hospital-a.example:7001`; empty if it only dials out.
        key: its public key, 80 characters of Z85.
        cell: its cell in the grid, if there is a grid.
    """

    name: str
    address: str
    key: str
    cell: Cell | None = None

    def __post_init__(self) -> None:
        check_name("name", self.name)
        if self.address != "":
            host_and_port(self.address)
        check_key(self.key, f"{self.name}.pub")
        if self.cell is not None:
            cell: Any = self.cell
            whole = isinstance(cell, (list, tuple)) and all(type(each) is int and each >= 0 for each in cell)
            if not whole or len(cell) != 2:
                raise InputError(f"cell is {cell!r}; write the row and the column, from 0, such as cell = [0, 2]")
            object.__setattr__(self, "cell", Cell(*cell))

    @property
    def endpoint(self) -> tuple[str, int]:
        """The host and port of the address, equal for all spellings of one address."""
        return host_and_port(self.address)


@dataclass(frozen=True)
class HubSite:
    """The address and public key of the hub. Invalid values raise an `InputError`.

    Attributes:
        address: where the participants connect to it, such as `tcp://hub.example:7000`.
        key: its public key, 80 characters of Z85.
    """

    address: str
    key: str

    def __post_init__(self) -> None:
        host_and_port(self.address)
        check_key(self.key, "the .pub that `cgd keygen hub` wrote")

    @property
    def endpoint(self) -> tuple[str, int]:
        """The host and port of the address."""
        return host_and_port(self.address)


def check_unique(what: str, participants: Iterable[Participant], of: Callable[[Participant], Hashable]) -> None:
    """Check that `of` has a different value for every participant.

    Args:
        what: the attribute that the error names.
        participants: the participants.
        of: the value to compare.

    Raises:
        InputError: two participants have the same value.
    """
    seen: dict[Hashable, Participant] = {}
    for each in participants:
        other = seen.setdefault(of(each), each)
        if other is not each:
            who = "two participants" if what == "name" else f"{other.name} and {each.name}"
            raise InputError(f"{who} have the same {what}, {getattr(each, what)!r}; every participant needs its own")
