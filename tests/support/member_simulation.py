"""A simulation of honest members without I/O, in which members and the hub are killed and restarted."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from cgd.errors import MembersChangedError, RemoteProtocolError
from cgd.secagg.codec import Frame, from_bytes, to_bytes
from cgd.secagg.federation_spec import FederationSpec
from cgd.secagg.hub_aggregator import HubAggregator
from cgd.secagg.journal import Journal
from cgd.secagg.journal_entry import Step
from cgd.secagg.membership import Membership
from cgd.secagg.messages import HUB, ResendRequest
from support.histories import certified_journal
from support.identities import identity, public_keys
from support.wire import spec

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from cgd.secagg.group import Group, PendingSum
    from cgd.secagg.messages import Message, Opening

    Alter = Callable[[str, str, Message], Message | None]  # sender, recipient, message

MEMBERS = ("a", "b", "c", "d")
SIZE = 5


def federation_spec(members: tuple[str, ...] = MEMBERS, epoch: int = 1, **changes: Any) -> FederationSpec:
    groups, sections = {"everyone": members}, {"training": "x", "participants": "y"}
    return replace(FederationSpec("trial", epoch, members, groups, sections, "1.0", public_keys(members)), **changes)


def addend(member: str, number: int) -> npt.NDArray[Any]:
    seed = sum(map(ord, member)) * 1000 + number
    return np.frombuffer(random.Random(seed).randbytes(4 * SIZE), dtype="<u4").copy()


def expected_total(number: int, members: tuple[str, ...] = MEMBERS) -> bytes:
    return np.sum([addend(member, number) for member in members], axis=0, dtype=np.uint32).tobytes()


def make_journal(sums: int) -> Journal:
    return certified_journal(spec(SIZE), map(expected_total, range(sums)), MEMBERS)


class Program:
    """A participant's process: a membership, and a program that requests one sum after the other."""

    def __init__(
        self, me: str, held: FederationSpec, sums: int, journal: Journal | None = None, opening: Opening = "mesh"
    ) -> None:
        self.me, self.sums, self.opening = me, sums, opening
        self.membership = Membership(me, identity(me), held, {} if journal is None else {"everyone": journal})
        self.totals: list[bytes] = []
        self.idle = False
        """True if the program requests no sums by itself."""

    @property
    def group(self) -> Group:
        return self.membership.group("everyone")

    def advance(self) -> None:
        if self.idle:
            return
        pending = self.group.pending
        if pending is not None and pending.fault is not None and not isinstance(pending.fault, MembersChangedError):
            raise pending.fault
        if pending is not None and pending.total is not None and len(self.totals) < pending.step.number + 1:  # type: ignore[union-attr]
            self.totals.append(pending.total.tobytes())
        waits = pending is not None and not pending.done
        if len(self.totals) < self.sums and not waits and self.group.next_sum_known:
            self.start(len(self.totals), self.group.next_epoch, Step(0, len(self.totals)))

    def start(self, number: int, epoch: int = 1, step: Step | None = None) -> PendingSum:
        """Request the next sum, with this program's addend to sum `number`."""
        settings = spec(SIZE, opening=self.opening)
        return self.membership.start("everyone", settings, partial(addend, self.me, number), epoch, step)

    def waiting_for(self) -> tuple[str, frozenset[str]]:
        return self.membership.waiting_for("everyone")


class MemberSimulation:
    """Processes and the queues of frames between them; a queue keeps its order, and is lost with either process.

    Frames for the hub survive a restart of the hub, as links keep frames that it has not acknowledged.
    """

    def __init__(self, seed: int, sums: int, held: FederationSpec | None = None, opening: Opening = "mesh") -> None:
        self.rng = random.Random(seed)
        self.sums = sums
        self.federation_spec = held or federation_spec()
        self.opening = opening
        self.aggregator = HubAggregator(self.federation_spec.groups)
        self.programs = {
            me: Program(me, self.federation_spec, sums, opening=opening) for me in self.federation_spec.members
        }
        self.queues: dict[tuple[str, str], deque[bytes]] = {}

    def step(self) -> None:
        program = self.rng.choice(list(self.programs.values()))
        program.advance()
        while (outgoing := program.membership.next_outgoing()) is not None:
            self.queues.setdefault((program.me, outgoing[0]), deque()).append(bytes(outgoing[1]))
        nonempty = [ends for ends, queue in self.queues.items() if queue]
        if nonempty:
            sender, to = self.rng.choice(nonempty)
            frame = self.queues[sender, to].popleft()
            if to == HUB:
                members, total = self.aggregator.receive(sender, frame) or ((), b"")
                for member in members:
                    self.queues.setdefault((HUB, member), deque()).append(bytes(total))
            elif to in self.programs:
                self.programs[to].membership.receive(sender, frame)
                self.programs[to].advance()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def kill(self, me: str, *, keep: bool) -> None:
        """Restart a member, with its journal or without."""
        journal = self.programs[me].group.journal if keep else None
        saved = Journal.from_bytes(journal.to_bytes()) if journal is not None else None
        idle = self.programs[me].idle
        self._drop_queues(me)
        self.programs[me] = Program(me, self.federation_spec, self.sums, saved, self.opening)
        self.programs[me].idle = idle

    def remove(self, me: str) -> None:
        del self.programs[me]
        self._drop_queues(me)

    def _drop_queues(self, me: str) -> None:
        for ends in list(self.queues):
            if me in ends:
                del self.queues[ends]

    def kill_hub(self) -> None:
        """Replace the hub by one without deposits."""
        self.aggregator = HubAggregator(self.federation_spec.groups)
        for me in self.programs:
            self.queues[HUB, me] = deque([to_bytes(Frame(bytes(16), 0, ResendRequest()))])

    def run(self, max_steps: int = 100_000) -> None:
        """Run until all programs have all their totals."""
        for _ in range(max_steps):
            if all(len(program.totals) == self.sums for program in self.programs.values()):
                return
            self.step()
        raise AssertionError({me: program.waiting_for() for me, program in self.programs.items()})

    def has_pending_reveal(self) -> bool:
        """Return whether a member has sent its key for an unfinished sum, which only the same members can repeat."""
        return any(program.group.journal.pending_reveal for program in self.programs.values())

    def finished(self) -> dict[str, int]:
        """Return the number of finished sums of each member."""
        return {me: len(program.group.journal) for me, program in self.programs.items()}

    def up_to_date(self) -> set[str]:
        """Return the members whose journals are known to be complete."""
        return {me for me, program in self.programs.items() if program.group.up_to_date}

    # Idle programs: tests start all sums, and all frames are delivered.

    @classmethod
    def idle(cls, sums: dict[str, int] | None = None, **changes: Any) -> MemberSimulation:
        """Make idle members, each with a journal of this many sums (none if not given)."""
        simulation = cls(0, sums=0, held=federation_spec(**changes))
        for me, count in (sums or {}).items():
            simulation.programs[me] = Program(me, simulation.federation_spec, 0, make_journal(count))
        for program in simulation.programs.values():
            program.idle = True
        return simulation

    def exchange(self, alter: Alter = lambda _sender, _to, message: message) -> list[RemoteProtocolError]:
        """Deliver all messages, as altered or dropped by `alter`, until there are none; return the errors."""
        errors: list[RemoteProtocolError] = []
        while frames := [
            (me, to, data)
            for me, program in self.programs.items()
            for to, data in iter(program.membership.next_outgoing, None)
        ]:
            for sender, to, data in frames:
                frame = from_bytes(data, sender)
                message = alter(sender, to, frame.message)
                if message is None or to not in self.programs:
                    continue
                try:
                    self.programs[to].membership.receive(sender, to_bytes(replace(frame, message=message)))
                except RemoteProtocolError as error:
                    errors.append(error)
        return errors

    def start_all(self, number: int = 0, epoch: int = 1) -> dict[str, PendingSum]:
        """Start the next sum of all members."""
        return {me: program.start(number, epoch) for me, program in self.programs.items()}


def totals_of(pending: dict[str, PendingSum]) -> set[bytes]:
    """Return the different totals of finished sums."""
    return {each.total.tobytes() for each in pending.values() if each.total is not None}
