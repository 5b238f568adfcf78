"""What the members of a group have opened together: enough to bring back one that has lost everything.

Every finished sum is an entry. A participant's program makes the same sums in the same order each time it runs, so one
that is started again gets the totals of the past from a ledger and joins the others where they are. To keep that small,
an optimiser leaves its state (the displacement) after every step: the totals that are contained in it are forgotten,
and a program that runs again skips those steps. The rules:

1. An entry's total is kept until it is contained in a state *and* the next sum is finished: until then a member that
   was interrupted at the last moment may need it.
2. A ledger that is longer contains a shorter one of the same group. Whoever is behind takes over what is missing.
3. Other totals (a count, a validation loss) are kept as long as together they stay small.

Everything in here is known to all members of the group, and to nobody else.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from cgd.errors import InputError, LocalProtocolError
from cgd.ring.fixed_point import WORD_TYPES

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from cgd.protocol.messages import Buffer, SumSpec

FORMAT = "cgd-ledger-2"
MOST_KEPT_BYTES = 64 << 20
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class Step:
    """A step of an optimiser; `slot` tells the optimisers of one program apart."""

    slot: int
    number: int


@dataclass(frozen=True)
class Entry:
    """One finished sum.

    Attributes:
        kind: what it was of, in words.
        epoch: in which it was made.
        clock: the step of the program's loop in which it was made.
        step: the step whose state will contain it, if it belongs to one.
        words: the total, if it is kept.
        addends: how many members it was made of.
    """

    kind: str
    epoch: int
    clock: int
    step: Step | None
    words: Buffer | None
    addends: int = 0


@dataclass(frozen=True)
class State:
    """The state of an optimiser after `steps` steps; its content is made when it is asked for."""

    steps: int
    content: Callable[[], bytes]


class Ledger:
    """The finished sums of one group.

    Examples:
        >>> import numpy as np
        >>> from cgd.protocol.messages import SumSpec
        >>> spec = SumSpec((2,), "float32", 32, 20, "expanded", "mesh")
        >>> ours, theirs = Ledger(), Ledger()
        >>> ours.append(spec, np.array([1, 2], dtype=np.uint32), epoch=1)
        >>> theirs.catch_up(Ledger.from_bytes(ours.to_bytes()))
        >>> theirs.total(0, spec)
        array([1, 2], dtype=uint32)
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.states: dict[int, State] = {}
        self._kept_bytes = 0

    def __len__(self) -> int:
        return len(self.entries)

    def append(
        self,
        spec: SumSpec,
        total: npt.NDArray[Any],
        epoch: int,
        clock: int = 0,
        step: Step | None = None,
        addends: int = 0,
    ) -> None:
        """Enter a sum that is finished."""
        self._forget_what_states_contain()
        self.entries.append(Entry(kind_of(spec), epoch, clock, step, total.data.cast("B"), addends))
        if step is None:
            self._kept_bytes += total.nbytes
            self._forget_the_oldest()

    def total(self, place: int, spec: SumSpec) -> npt.NDArray[Any]:
        """The total of an entry, for a program that asks for it again.

        Raises:
            LocalProtocolError: the program asks for another sum than was made then, or the total is forgotten.
        """
        entry = self.entries[place]
        if entry.kind != kind_of(spec):
            raise LocalProtocolError(
                f"sum {place + 1} was of {entry.kind} when it was made, and this program asks for {kind_of(spec)}; "
                "a participant that comes back must make the same sums in the same order as before"
            )
        if entry.words is None:
            raise LocalProtocolError(
                f"the total of sum {place + 1} is not kept any more; begin where the members are, with "
                "`for step in optimizer.steps(count)`"
            )
        dtype = WORD_TYPES[spec.ring_bits]
        if len(entry.words) != spec.size * dtype.itemsize:
            raise LocalProtocolError(f"the total of sum {place + 1} is damaged; delete the state folder and join again")
        return np.frombuffer(entry.words, dtype=dtype)

    def remember(self, slot: int, steps: int, content: Callable[[], bytes]) -> None:
        """An optimiser has taken `steps` steps; `content` makes its state."""
        self.states[slot] = State(steps, content)

    def catch_up(self, other: Ledger) -> None:
        """Take over what a longer ledger of the same group has."""
        self.entries += other.entries[len(self) :]
        for slot, state in other.states.items():
            if slot not in self.states or state.steps > self.states[slot].steps:
                self.states[slot] = state
        self._count_kept()

    def entry(self, place: int) -> tuple[Buffer, ...]:
        """One entry, to be saved as soon as it is made; in pieces, so that a large total is not copied for it."""
        entry = self.entries[place]
        header = json.dumps(_row(entry)).encode()
        return (_LENGTH.pack(len(header)), header, *((entry.words,) if entry.words else ()))

    def add_entry(self, data: Buffer) -> None:
        """Append what `entry` gave, all pieces joined.

        There is no digest: it would cost as much as the rest. What is cut off is noticed here, and a wrong total when
        the members compare their displacements.

        Raises:
            InputError: it is damaged.
        """
        try:
            view = memoryview(data)
            (length,) = _LENGTH.unpack_from(view)
            row, rest = json.loads(bytes(view[_LENGTH.size : _LENGTH.size + length])), view[_LENGTH.size + length :]
            entry, rest = _entry(row, rest)
            if len(rest):
                raise ValueError("it is too long")
        except (ValueError, TypeError, RecursionError, struct.error) as error:
            raise InputError(f"this is not an entry that cgd made: {error}") from None
        self.entries.append(entry)
        self._count_kept()

    def to_bytes(self) -> bytes:
        """The whole ledger, to be sent or saved: a JSON header, then the totals and states one behind the other."""
        contents = {slot: state.content() for slot, state in self.states.items()}
        entries = [_row(each) for each in self.entries]
        states = [(slot, self.states[slot].steps, len(content)) for slot, content in contents.items()]
        header = json.dumps({"format": FORMAT, "entries": entries, "states": states}).encode()
        totals = (entry.words for entry in self.entries if entry.words)
        body = b"".join((_LENGTH.pack(len(header)), header, *totals, *contents.values()))
        return hashlib.sha256(body).digest() + body

    @classmethod
    def from_bytes(cls, data: Buffer) -> Ledger:
        """Read what `to_bytes` made.

        Raises:
            InputError: it is damaged, or not a ledger.
        """
        ledger = cls()
        view = memoryview(data)
        digest, body = bytes(view[:32]), view[32:]
        try:
            if hashlib.sha256(body).digest() != digest:
                raise ValueError("its digest is wrong")
            (length,) = _LENGTH.unpack_from(body)
            header = json.loads(bytes(body[_LENGTH.size : _LENGTH.size + length]))
            if header["format"] != FORMAT:
                raise ValueError(f"its format is {header['format']!r}, not {FORMAT!r}")
            rest = body[_LENGTH.size + length :]
            for row in header["entries"]:
                entry, rest = _entry(row, rest)
                ledger.entries.append(entry)
            for slot, steps, size in header["states"]:
                if not all(type(each) is int and each >= 0 for each in (slot, steps, size)) or size > len(rest):
                    raise ValueError("a state is malformed")
                content, rest = bytes(rest[:size]), rest[size:]
                ledger.states[slot] = State(steps, lambda content=content: content)  # type: ignore[misc]
        except (ValueError, KeyError, TypeError, RecursionError, struct.error) as error:
            raise InputError(f"this is not a ledger that cgd made: {error}") from None
        return ledger

    def _count_kept(self) -> None:
        self._kept_bytes = sum(len(entry.words) for entry in self.entries if entry.step is None and entry.words)

    def _forget_what_states_contain(self) -> None:
        """Rule 1; only the tail can hold such totals."""
        for place in range(len(self.entries) - 1, -1, -1):
            entry = self.entries[place]
            if entry.step is None:
                continue
            if entry.words is None:
                return
            if entry.step.slot in self.states and entry.step.number < self.states[entry.step.slot].steps:
                self.entries[place] = replace(entry, words=None)

    def _forget_the_oldest(self) -> None:
        """Rule 3."""
        for place, entry in enumerate(self.entries):
            if self._kept_bytes <= MOST_KEPT_BYTES:
                return
            if entry.step is None and entry.words is not None:
                self._kept_bytes -= len(entry.words)
                self.entries[place] = replace(entry, words=None)


def _row(entry: Entry) -> list[Any]:
    """An entry as JSON; its total follows elsewhere."""
    step, size = entry.step and astuple(entry.step), entry.words and len(entry.words)
    return [entry.kind, entry.epoch, entry.clock, step, size, entry.addends]


def _entry(row: list[Any], rest: memoryview) -> tuple[Entry, memoryview]:
    """The entry that `_row` told of, whose total comes next, and what comes after that."""
    kind, epoch, clock, step, size, addends = row
    numbers = (epoch, clock, addends, *(step or ()))
    if not isinstance(kind, str) or not all(type(each) is int for each in numbers):
        raise ValueError("an entry is malformed")
    if size is not None and not 0 < size <= len(rest):
        raise ValueError("it is cut off")
    words, rest = (None, rest) if size is None else (rest[:size], rest[size:])
    return Entry(kind, epoch, clock, None if step is None else Step(*step), words, addends), rest


def kind_of(spec: SumSpec) -> str:
    """What a sum is of, in words: what a program that runs again must ask for again."""
    weighted = "weighted " if spec.weighted else ""
    return f"{weighted}{spec.dtype}{list(spec.shape)} in {spec.ring_bits} bits"
