"""What the members of a group have opened together: enough to bring back one that has lost everything.

Every finished sum is an entry. A participant's program makes the same sums in the same order each time it runs, so one
that is started again gets the totals of the past from a ledger and joins the others where they are. To keep that small,
an optimiser leaves its state (the displacement) after every step: the totals that are contained in it are forgotten,
and a program that runs again skips those steps. The rules:

1. An entry's total is kept until it is contained in a state *and* the next sum is finished: until then a member that
   was interrupted at the last moment may need it.
2. A ledger that is longer contains a shorter one of the same group. Whoever is behind takes over what is missing.
3. Other totals (a count, a validation loss) are kept as long as together they stay small.
4. Every entry is linked to the one before by a hash chain. Its certificate (`history.py`) is kept as long as its total
   is, and that of the last entry always.

Everything in here is known to all members of the group, and to nobody else.
"""

from __future__ import annotations

import json
import struct
from dataclasses import astuple, dataclass, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np

from cgd.errors import InputError, LocalProtocolError
from cgd.secagg.certificates import GENESIS, Certificate, PendingReveal, kind_of, link
from cgd.secagg.fixed_point import WORD_TYPES
from cgd.secagg.positions import StateRow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import numpy.typing as npt

    from cgd.secagg.messages import Buffer, SumSpec

FORMAT = "cgd-ledger-3"
MAX_KEPT_BYTES = 64 << 20
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class Step:
    """A step of an optimiser; `slot` tells the optimisers of one program apart."""

    slot: int
    number: int


@dataclass(frozen=True)
class JournalEntry:
    """One finished sum.

    Attributes:
        kind: what it was of, in words.
        epoch: in which it was made.
        clock: the step of the program's loop in which it was made.
        step: the step whose state will contain it, if it belongs to one.
        size: how many bytes the total has.
        addends: how many members it was made of.
        opening: the digest that tells what was opened; see `history.opening_digest`.
        words: the total, if it is kept.
        certificate: the proof that this total is right, if it is kept.
    """

    kind: str
    epoch: int
    clock: int
    step: Step | None
    size: int
    addends: int
    opening: bytes
    words: Buffer | None = None
    certificate: Certificate | None = None

    @property
    def fields(self) -> list[Any]:
        """What the hash chain covers."""
        step = self.step and list(astuple(self.step))
        return [self.kind, self.epoch, self.clock, step, self.size, self.addends, self.opening.hex()]


@dataclass(frozen=True)
class OptimizerState:
    """The state of an optimiser after `steps` steps; its content is made when it is asked for.

    `fixed` states do not change until they are replaced, so their content can be compared at any time.
    """

    steps: int
    content: Callable[[], bytes]
    fixed: bool = False


class Journal:
    """The finished sums of one group.

    Examples:
        >>> import numpy as np
        >>> from cgd.secagg.messages import SumSpec
        >>> spec = SumSpec((2,), "float32", 32, 20, "expanded", "mesh")
        >>> ours, theirs = Journal(), Journal()
        >>> ours.append(spec, np.array([1, 2], dtype=np.uint32), epoch=1)
        >>> theirs.catch_up(Journal.from_bytes(ours.gift(0, states=True)))
        >>> theirs.total(0, spec)
        array([1, 2], dtype=uint32)
    """

    def __init__(self) -> None:
        self.entries: list[JournalEntry] = []
        self.heads: list[bytes] = [GENESIS]
        """The head of the hash chain after so many entries."""
        self.states: dict[int, OptimizerState] = {}
        self.mark: PendingReveal | None = None
        """The sum for which our key has left us, while it is not finished."""
        self._kept_bytes = 0
        self._fixed: tuple[dict[int, OptimizerState], bytes] = {}, sha256(b"").digest()

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def head(self) -> bytes:
        """The head of the hash chain."""
        return self.heads[-1]

    def append(
        self,
        spec: SumSpec,
        total: npt.NDArray[Any],
        epoch: int,
        clock: int = 0,
        step: Step | None = None,
        addends: int = 0,
        certificate: Certificate | None = None,
    ) -> None:
        """Enter a sum that is finished."""
        self._forget_what_states_contain()
        words = total.data.cast("B")
        opening = certificate.opening if certificate is not None else sha256(words).digest()
        self._enter(JournalEntry(kind_of(spec), epoch, clock, step, len(words), addends, opening, words, certificate))
        if step is None:
            self._kept_bytes += total.nbytes
            self._forget_the_oldest()

    def _enter(self, entry: JournalEntry) -> None:
        self.entries.append(entry)
        self.heads.append(link(self.head, entry.fields))
        if self.mark is not None and self.mark.place < len(self):
            self.mark = None

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

    def remember(self, slot: int, steps: int, content: Callable[[], bytes], *, fixed: bool = False) -> None:
        """An optimiser has taken `steps` steps; `content` makes its state."""
        self.states[slot] = OptimizerState(steps, content, fixed)

    def state_rows(self, slots: Iterable[int] | None = None) -> tuple[StateRow, ...]:
        """Describe the states that are remembered, to be compared with what others remember."""
        rows = []
        for slot in sorted(self.states if slots is None else slots):
            state = self.states[slot]
            content = state.content()
            rows.append(StateRow(slot, state.steps, len(content), state.fixed, sha256(content).digest()))
        return tuple(rows)

    def kept_digest(self) -> bytes:
        """Digest the fixed states; made anew only when one of them was replaced."""
        fixed = {slot: state for slot, state in self.states.items() if state.fixed}
        if fixed != self._fixed[0]:
            rows = [[row.slot, row.steps, row.digest.hex()] for row in self.state_rows(fixed)]
            self._fixed = fixed, sha256(json.dumps(rows).encode() if rows else b"").digest()
        return self._fixed[1]

    def end(self) -> bytes:
        """Digest the history and all states: what members compare when they are done."""
        rows = [[row.slot, row.steps, row.digest.hex()] for row in self.state_rows()]
        return sha256(self.head + json.dumps(rows).encode()).digest()

    def catch_up(self, other: Journal, *, states: bool = True) -> None:
        """Take over what a ledger of the same group has that begins where this one ends."""
        for entry in other.entries:
            self._enter(entry)
        for slot, state in other.states.items() if states else ():
            if slot not in self.states or state.steps > self.states[slot].steps:
                self.states[slot] = state
        self._count_kept()

    def entry(self, place: int) -> tuple[Buffer, ...]:
        """One entry, to be saved as soon as it is made; in pieces, so that a large total is not copied for it."""
        entry = self.entries[place]
        header = json.dumps(_row(entry)).encode()
        return (_LENGTH.pack(len(header)), header, *((entry.words,) if entry.words else ()))

    def mark_record(self) -> tuple[Buffer, ...]:
        """The mark, to be saved before our key leaves us, in pieces as those of an entry."""
        header = json.dumps({"mark": self.mark and self.mark.to_json()}).encode()
        return _LENGTH.pack(len(header)), header

    def add_record(self, data: Buffer) -> None:
        """Take in what `entry` or `mark_record` gave, all pieces joined.

        There is no digest: it would cost as much as the rest. What is cut off is noticed here, and a wrong total when
        the members compare their displacements.

        Raises:
            InputError: it is damaged.
        """
        try:
            view = memoryview(data)
            (length,) = _LENGTH.unpack_from(view)
            row, rest = json.loads(bytes(view[_LENGTH.size : _LENGTH.size + length])), view[_LENGTH.size + length :]
            if isinstance(row, dict):
                self.mark = None if row["mark"] is None else PendingReveal.from_json(row["mark"])
                return
            entry, rest = _entry(row, rest)
            if len(rest):
                raise ValueError("it is too long")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, struct.error) as error:
            raise InputError(f"this is not an entry that cgd made: {error}") from None
        self._enter(entry)
        self._count_kept()

    def to_bytes(self) -> bytes:
        """The whole ledger, to be saved."""
        return self._bytes(self.entries, self.mark, self.states)

    def gift(self, since: int, *, states: bool) -> bytes:
        """What a member lacks that has `since` entries; without totals that the states contain."""
        last = len(self) - 1
        rows = [
            entry if place == last or not self._contained(entry) else replace(entry, words=None, certificate=None)
            for place, entry in enumerate(self.entries[since:], start=since)
        ]
        return self._bytes(rows, None, self.states if states else {})

    def _bytes(
        self, entries: Sequence[JournalEntry], mark: PendingReveal | None, states: Mapping[int, OptimizerState]
    ) -> bytes:
        """A JSON header, then the totals and states one behind the other."""
        contents = {slot: state.content() for slot, state in states.items()}
        rows = [(slot, states[slot].steps, len(content), states[slot].fixed) for slot, content in contents.items()]
        marked = mark and mark.to_json()
        content = {"format": FORMAT, "entries": [_row(each) for each in entries], "states": rows, "mark": marked}
        header = json.dumps(content).encode()
        totals = (entry.words for entry in entries if entry.words)
        body = b"".join((_LENGTH.pack(len(header)), header, *totals, *contents.values()))
        return sha256(body).digest() + body

    @classmethod
    def from_bytes(cls, data: Buffer) -> Journal:
        """Read what `to_bytes` made.

        Raises:
            InputError: it is damaged, or not a ledger.
        """
        view = memoryview(data)
        digest, body = bytes(view[:32]), view[32:]
        try:
            if sha256(body).digest() != digest:
                raise ValueError("its digest is wrong")
            return cls._read(*read_header(body))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
            raise InputError(f"this is not a ledger that cgd made: {error}") from None

    @classmethod
    def _read(cls, header: dict[str, Any], rest: memoryview) -> Journal:
        journal = cls()
        for row in header["entries"]:
            entry, rest = _entry(row, rest)
            journal._enter(entry)
        for slot, steps, size, fixed in header["states"]:
            if not all(type(each) is int and each >= 0 for each in (slot, steps, size)) or size > len(rest):
                raise ValueError("a state is malformed")
            content, rest = bytes(rest[:size]), rest[size:]
            journal.states[slot] = OptimizerState(steps, lambda content=content: content, bool(fixed))  # type: ignore[misc]
        journal.mark = None if header["mark"] is None else PendingReveal.from_json(header["mark"])
        return journal

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
            if self._contained(entry):
                self.entries[place] = replace(entry, words=None, certificate=None)

    def _contained(self, entry: JournalEntry) -> bool:
        step = entry.step
        return step is not None and step.slot in self.states and step.number < self.states[step.slot].steps

    def _forget_the_oldest(self) -> None:
        """Rule 3."""
        for place, entry in enumerate(self.entries[:-1]):
            if self._kept_bytes <= MAX_KEPT_BYTES:
                return
            if entry.step is None and entry.words is not None:
                self._kept_bytes -= len(entry.words)
                self.entries[place] = replace(entry, words=None, certificate=None)


def read_header(body: memoryview) -> tuple[dict[str, Any], memoryview]:
    """Read the header of a ledger's bytes behind their digest, and what comes after it."""
    (length,) = _LENGTH.unpack_from(body)
    header = json.loads(bytes(body[_LENGTH.size : _LENGTH.size + length]))
    if header["format"] != FORMAT:
        raise ValueError(f"its format is {header['format']!r}, not {FORMAT!r}")
    return header, body[_LENGTH.size + length :]


def _row(entry: JournalEntry) -> list[Any]:
    """An entry as JSON; its total follows elsewhere."""
    return [entry.fields, entry.words is not None, entry.certificate and entry.certificate.to_json()]


def read_row(row: Any) -> tuple[JournalEntry, bool]:
    """The entry that `_row` told of, without its total, and whether that follows."""
    (kind, epoch, clock, step, size, addends, opening), kept, certificate = row
    numbers = (epoch, clock, size, addends, *(step or ()))
    if not isinstance(kind, str) or not all(type(each) is int and each >= 0 for each in numbers):
        raise ValueError("an entry is malformed")
    proof = None if certificate is None else Certificate.from_json(certificate)
    made = None if step is None else Step(*step)
    return JournalEntry(kind, epoch, clock, made, size, addends, bytes.fromhex(opening), None, proof), bool(kept)


def _entry(row: Any, rest: memoryview) -> tuple[JournalEntry, memoryview]:
    """The entry that `_row` told of, whose total comes next, and what comes after that."""
    entry, kept = read_row(row)
    if not kept:
        return entry, rest
    if not 0 < entry.size <= len(rest):
        raise ValueError("it is cut off")
    return replace(entry, words=rest[: entry.size]), rest[entry.size :]
