"""One group of members that sum together, over the whole life of a federation: a ledger, and a session at a time."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cgd.errors import CGDError, InputError, LocalProtocolError, MembersChangedError
from cgd.protocol.ephemeral import common_key
from cgd.protocol.ledger import Ledger
from cgd.protocol.messages import SESSION_BYTES
from cgd.protocol.reducing import HubSide
from cgd.protocol.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt

    from cgd.protocol.ledger import Step
    from cgd.protocol.messages import Buffer, PeerId, Piece, Reason, SumSpec

MOST_LEDGER_BYTES = 16 << 30


@dataclass
class Pending:
    """A sum that our program waits for.

    Attributes:
        spec: what is summed, and how.
        encode: makes our addend, anew each time it is called.
        epoch: for whose members the addend is made.
        step: the step of an optimiser that it belongs to, if any.
        total: when it is finished.
        fault: when it has failed.
    """

    spec: SumSpec
    encode: Callable[[], npt.NDArray[Any]]
    epoch: int
    step: Step | None
    total: npt.NDArray[Any] | None = None
    abandoned: bool = False
    fault: CGDError | None = None

    @property
    def over(self) -> bool:
        """Whether it is finished or has failed."""
        return self.total is not None or self.fault is not None


@dataclass
class Group:
    """Where we stand with one group.

    Attributes:
        name: of the group.
        members: their names.
        ledger: what was summed so far.
        epoch: the present one.
        place: how many of its sums our program has made in this run.
        current: whether our ledger is known to be as long as anybody's.
        session: of the present view, if there is one.
        pending: the sum that our program waits for, or the last one.
        holder: the peer that we have asked for its ledger, if we have.
        doubted: peers whose ledger was none.
        received: what has come of the holder's.
        refusal: why our program cannot take part in its next sum, until the others can be told.
    """

    name: str
    members: tuple[PeerId, ...]
    ledger: Ledger
    epoch: int = 0
    place: int = 0
    current: bool = False
    session: Session | None = None
    pending: Pending | None = None
    holder: PeerId | None = None
    doubted: frozenset[PeerId] = frozenset()
    received: bytearray = field(default_factory=bytearray)
    refusal: Reason | None = None

    @property
    def ready(self) -> bool:
        """Whether it is known what our program's next sum is."""
        return self.current or self.place < len(self.ledger)

    @property
    def next_epoch(self) -> int:
        """The epoch of our program's next sum: of the past if it is made again, else the present one."""
        return self.ledger.entries[self.place].epoch if self.place < len(self.ledger) else self.epoch

    @property
    def next_addends(self) -> int:
        """How many members our program's next sum has, or had when it was made."""
        return self.ledger.entries[self.place].addends if self.place < len(self.ledger) else len(self.members)

    def start(self, pending: Pending, clock: int) -> Pending:
        """Our program wants its next sum; one that it gave up waiting for is that sum."""
        before = self.pending
        if before is not None and not before.over:
            if not before.abandoned or before.spec != pending.spec:
                raise LocalProtocolError("a sum is still running; a member's sums run one after the other")
            before.abandoned = False
            return before
        self.pending, self.refusal = pending, None
        self.run(clock)
        return pending

    def abandon(self) -> None:
        """Our program waits no longer, but may have shared its addend: it stays what it is, whatever becomes of it."""
        pending = self.pending
        if pending is None or pending.fault is not None:
            return
        if pending.total is not None:
            self.place -= 1
            return
        words = pending.encode()
        pending.encode, pending.abandoned = words.copy, True

    def run(self, clock: int) -> None:
        """Begin the sum that our program waits for, or take it from the past."""
        if self.refusal is not None:
            self.refuse(self.refusal)
        pending = self.pending
        if pending is None or pending.over:
            return
        try:
            if self.place < len(self.ledger):
                pending.total = self.ledger.total(self.place, pending.spec)
                self.place += not pending.abandoned
            elif self.current and self.session is not None:
                if pending.epoch != self.epoch:
                    raise MembersChangedError(pending.epoch, self.epoch, self.members)
                self.session.start(pending.spec, pending.encode())
                self.settle(clock)
        except CGDError as error:
            pending.fault = error

    def receive(self, sender: PeerId, data: Buffer, clock: int) -> None:
        """Take in a frame of the session."""
        assert self.session is not None  # noqa: S101 - for the type checker
        try:
            self.session.receive(sender, data)
        except CGDError as error:
            if self.pending is None or self.pending.over:
                raise
            self.pending.fault = error
        self.settle(clock)

    def settle(self, clock: int) -> None:
        """Enter the running sum into the ledger if it is finished."""
        pending, session = self.pending, self.session
        if pending is None or pending.over or session is None or not self.current:
            return
        if session.fault is not None:
            pending.fault = session.fault
        if not session.finished:
            return
        if self.place != len(self.ledger):
            return
        self.ledger.append(pending.spec, session.total, self.epoch, clock, pending.step, len(self.members))
        pending.total = session.total
        self.place += not pending.abandoned

    def refuse(self, reason: Reason) -> None:
        """Tell the others that we cannot take part in the next sum, if that is one of the present."""
        self.refusal = reason
        if self.session is not None and self.current:
            self.refusal = None
            if self.place == len(self.ledger):
                self.session.refuse(reason)

    def skip(self, slot: int, steps: int) -> None:
        """Our program does without the sums up to the end of this many steps of an optimiser: it has their outcome."""
        for place in range(len(self.ledger) - 1, self.place - 1, -1):
            step = self.ledger.entries[place].step
            if step is not None and step.slot == slot and step.number < steps:
                self.place = place + 1
                return

    def jump(self, clock: int) -> None:
        """Our program begins with this step of its loop: what it summed in earlier ones is not asked for again."""
        while self.place < len(self.ledger) and self.ledger.entries[self.place].clock < clock:
            self.place += 1

    def take_piece(self, sender: PeerId, piece: Piece, finished: int) -> bool:
        """Take in a piece of the holder's ledger, which should have this many sums; whether we have caught up with it.

        Raises:
            InputError: all of it is here, and it is none.
        """
        if sender != self.holder or sender in self.doubted or piece.start != len(self.received):
            return False
        self.received += piece.words
        if len(self.received) < piece.size <= MOST_LEDGER_BYTES:
            return False
        given = Ledger.from_bytes(bytes(self.received))
        if len(given) < finished:
            raise InputError(f"it has {len(given)} sums, not the {finished} it told of")
        self.ledger.catch_up(given)
        return True

    def enter_view(self, me: PeerId, view: bytes, pair_keys: Mapping[PeerId, bytes]) -> None:
        """Have a session of its own in this view."""
        session = hashlib.sha256(view + self.name.encode()).digest()[:SESSION_BYTES]
        own = {peer: pair_keys[peer] for peer in self.members if peer != me}
        self.session = Session(me, self.members, session, own)

    def share_key(self, contributions: Mapping[PeerId, bytes]) -> None:
        """Everybody has contributed to the key that the members have in common."""
        if self.session is not None:
            own = {member: contributions[member] for member in self.members}
            self.session.hub = HubSide(self.name, common_key(own, self.session.session))

    def leave_view(self) -> None:
        """The present session is over, and where the others stand is not known."""
        self.session, self.current, self.holder = None, False, None
