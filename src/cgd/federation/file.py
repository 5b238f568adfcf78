"""The federation file: who takes part, where each is found, and how they train.

Every participant holds the same file. What counts is its content: comments and the order of keys and participants are
free, and the members compare a digest of every section (`Federation.sections`) before anything is summed. A change
raises the epoch by one, so that nobody goes on under an old file unnoticed.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import tomllib
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cgd.errors import InputError, MembershipError
from cgd.federation.keys import Participant, check_name, check_unique, read_text, replace_text, similar, write_new
from cgd.learning.grid import Grid
from cgd.network.peers import SumSettings
from cgd.network.sockets import Contact
from cgd.protocol.charter import Charter
from cgd.protocol.members import FEWEST_MEMBERS
from cgd.ring.fixed_point import FixedPoint

if TYPE_CHECKING:
    import os
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from cgd.protocol.messages import Opening, Sharing

__all__ = ["Federation", "Participant", "Training", "new", "with_participant", "without"]

KINDS = {int: "a whole number", float: "a number", str: "a text, in quotes"}
COMMENTS = {
    "epoch": "goes up by one with every change",
    "mu": "above 0, the step size shrinks",
    "bound": "the largest magnitude of a gradient coordinate",
    "ring_bits": "or 64",
    "sharing": 'or "uniform"',
    "opening": 'or "aggregator"',
    "aggregator": "the participant that adds up, if there is one",
    "minimum": "never fewer members than this",
    "cell": "row and column",
}
# One participant in the text: the comments right above, the header, its keys, the comments right below.
EPOCH = re.compile(r"^(\s*epoch\s*=\s*)\d+", re.MULTILINE)
BLOCK = re.compile(
    r"""^(?:[ \t]*\#.*\n)*[ \t]*\[\[[ \t]*participants[ \t]*\]\].*\n
        (?:(?:[ \t]*(?:\#.*)?\r?\n)*[ \t]*[^\s\#\[].*\n)*
        (?:(?!(?:[ \t]*\#.*\n)+[ \t]*\[)[ \t]*\#.*\n)*""",
    re.MULTILINE | re.VERBOSE,
)


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
        opening: "mesh" or "aggregator".
        aggregator: the name of that participant.
        minimum: there are never fewer members than this.
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
            raise InputError(f"mu is {self.mu}; it must be a finite number, at least 0 (for a fixed step size)")
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
class Federation:
    """What the federation file says. What could not be summed safely raises an `InputError`.

    Attributes:
        name: of the federation.
        epoch: counts the changes of the file, from 1.
        training: how the members train.
        participants: all of them, by name.
        path: where the file is.
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
        check_unique("name", self.participants, lambda each: each.name)
        check_unique("key", self.participants, lambda each: each.key)
        check_unique("address", self.participants, lambda each: each.place)
        count, minimum = len(self.participants), self.training.minimum
        if count < minimum:
            because = "a sum over fewer hides nothing" if minimum == FEWEST_MEMBERS else "minimum in [training]"
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
        groups = {"everyone": self.names}
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
        return digest_of(self.epoch, self.sections())

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
        names = ", ".join(self.names)
        raise MembershipError(
            f"{name!r} is no participant of {self.name}{similar(name, self.names)}; name one of {names}"
        )

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
        if grid.rows < FEWEST_MEMBERS:
            raise InputError(
                f"the grid has {grid.rows} row(s), and a sum over a column of fewer than {FEWEST_MEMBERS} hides "
                "nothing; add rows, or take the cells away"
            )


def digest_of(epoch: int, sections: Mapping[str, str]) -> str:
    """A digest of everything: of a file, or of what a peer says of its own."""
    return _digest([epoch, dict(sections)])


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
    head = "# The federation file. Every participant holds the same, and they compare it before they sum."
    settings = _lines(asdict(made.training))
    blocks = "".join(f"\n{_block(each)}" for each in made.participants)
    write_new(path, f"{head}\n{_lines({'name': name, 'epoch': 1})}\n[training]\n{settings}{blocks}", 0o644)
    return made


def without(path: str | os.PathLike[str], name: str) -> Federation:
    """Take a participant out of the file. The epoch goes up by one, and comments stay.

    Raises:
        InputError: there is no such participant, or the rest could not be used; the file is as it was.
    """
    text = read_text(Path(path))
    before = Federation.parse(text, Path(path))
    with _at(f"{path}: "):
        gone = before.participant(name)
    for block in BLOCK.finditer(text):
        if gone.key in block[0]:
            text = text[: block.start()] + text[block.end() :].removeprefix("\r").removeprefix("\n")
            break
    rest = tuple(each for each in before.participants if each != gone)
    return _rewrite(before, rest, f"without {name}", text)


def with_participant(path: str | os.PathLike[str], participant: Participant) -> Federation:
    """Add a participant to the file, after the others. The epoch goes up by one, and comments stay.

    Raises:
        InputError: the whole could not be used, such as with a second one of that name; the file is as it was.
    """
    text = read_text(Path(path)).rstrip("\n") + "\n"
    before = Federation.parse(text, Path(path))
    end = max((block.end() for block in BLOCK.finditer(text)), default=0)
    text = f"{text[:end]}\n{_block(participant)}{text[end:]}"
    return _rewrite(before, (*before.participants, participant), f"with {participant.name}", text)


def _rewrite(before: Federation, participants: tuple[Participant, ...], change: str, text: str) -> Federation:
    """Write the changed text with a new epoch, if it then says what it should."""
    path = before.path
    with _at(f"{path} stays as it is, for {change} it could not be used: "):
        after = replace(before, epoch=before.epoch + 1, participants=participants)
    text = EPOCH.sub(rf"\g<1>{after.epoch}", text, count=1)
    try:
        faithful = Federation.parse(text, path) == after
    except InputError:
        faithful = False
    if not faithful:
        raise InputError(
            f"{path} stays as it is, for it is not laid out as cgd writes it; write [[participants]] above each "
            f"participant, or change it by hand: {change}, epoch = {after.epoch}"
        )
    replace_text(path, text)
    return after


def _block(participant: Participant) -> str:
    return "[[participants]]\n" + _lines(
        {key: value for key, value in asdict(participant).items() if value is not None}
    )


def _lines(table: dict[str, Any]) -> str:
    # TOML writes these values as JSON does.
    comments = {key: f"  # {comment}" for key, comment in COMMENTS.items()}
    return "".join(f"{key} = {json.dumps(value)}{comments.get(key, '')}\n" for key, value in table.items())


@contextmanager
def _at(where: str) -> Iterator[None]:
    try:
        yield
    except InputError as error:
        raise InputError(f"{where}{error}") from None


def _participant(number: int, table: Any) -> Participant:
    name = table.get("name") if isinstance(table, dict) else None
    with _at(f"participant {number} ({name!r}): " if isinstance(name, str) else f"participant {number}: "):
        _check_keys(table, ("name", "address", "key"), ("cell",))
        return Participant(**table)


def _check_keys(table: Any, needed: Collection[str], optional: Collection[str]) -> None:
    if not isinstance(table, dict):
        raise InputError(f"{table!r} is no table; write its header, and KEY = VALUE in every line")
    known = (*needed, *optional)
    for key in table:
        if key not in known:
            raise InputError(f"there is no {key!r}{similar(key, known)}; choose one of {', '.join(known)}")
    for key in needed:
        if key not in table:
            raise InputError(f"{key} is missing; add it")


def _check_integers(value: Any) -> None:
    """Refuse numbers beyond TOML's 64 bits, which Python would read and not always print."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise InputError("a whole number is beyond 64 bits; write a smaller one")
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_integers(each)


def _typed(name: str, value: Any, kind: type) -> Any:
    if kind is float and type(value) in (int, float):
        return float(value) + 0.0  # -0.0 becomes 0.0, which equals it
    if type(value) is not kind:
        raise InputError(f"{name} is {value!r}; it is {KINDS[kind]}")
    return value


def _digest(content: Any) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:32]
