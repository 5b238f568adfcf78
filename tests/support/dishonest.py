"""A simulation of one dishonest member among honest ones, without I/O: the invariants hold whatever it sends.

`Simulation` has honest members, each with a program that requests some sums, and one dishonest member. That one runs
the real protocol, so that it gets far, and an `Adversary` replaces its messages: copied keys, forged history, different
statements for different members, withheld or early keys, restarts with a forged state. Honest members are killed and
restarted; members change. A random schedule, given by a seed, decides everything. The invariants:

1. Honest members that finish a sum have the same bits and the same history.
2. The observations of the dishonest member determine neither an honest member's addend nor a sum over part of the
   honest members: see `Observations`.
3. No honest member crashes.
4. An honest member that accuses a member of violating the protocol accuses the dishonest one.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from cgd.errors import (
    CGDError,
    DisagreementError,
    HubError,
    LocalProtocolError,
    MembersChangedError,
    PeerAbortedError,
    PeerLeftError,
    RemoteProtocolError,
    SettingsError,
)
from cgd.secagg.codec import Frame, from_bytes, to_bytes
from cgd.secagg.journal import Journal
from cgd.secagg.messages import JournalPosition
from cgd.secagg.positions import PositionReport
from cgd.secagg.statements import slot_of, statement
from support.adversary import ADVERSARY, Adversary
from support.observations import InvariantError, Observations
from support.summing_program import Program, _identity, federation_spec

if TYPE_CHECKING:
    from collections.abc import Callable

    from cgd.secagg.group import Group
    from cgd.secagg.messages import Message

    Alter = Callable[[str, Frame], Message | None]  # recipient, frame of the dishonest member

HONEST = ("a", "b", "d", "e")
MAX_ROUNDS = 200
# These errors state only that a sum failed, or that members differ: they accuse no member.
NO_ACCUSATION = (PeerAbortedError, PeerLeftError, SettingsError, HubError)


class Simulation:
    """Processes and the queues of frames between them; a queue keeps its order, and is lost with either process.

    Args:
        seed: the seed of the schedule, or the source of its decisions.
        honest: the number of honest members.
        sums: the number of sums that each program requests.
    """

    def __init__(self, seed: int | random.Random, honest: int = 2, sums: int = 2) -> None:
        self.rng = seed if isinstance(seed, random.Random) else random.Random(seed)
        self.sums = sums
        self.honest = HONEST[:honest]
        self.federation_spec = federation_spec(tuple(sorted((*self.honest, ADVERSARY))), 1)
        self.programs = {me: Program(me, self.federation_spec, sums) for me in self.federation_spec.members}
        self.adversary = Adversary(ADVERSARY, _identity(ADVERSARY), self.rng)
        # One honest member stays and keeps its state: if all state is lost, the dishonest member's journal is accepted.
        self.durable = self.rng.choice(self.honest)
        self.queues: dict[tuple[str, str], deque[bytes]] = {}
        self.observations = Observations()
        self.finished: dict[int, dict[str, set[bytes]]] = {}
        self.old_journals = {Journal().head: Journal().to_bytes()}
        """Every journal that the dishonest member ever had."""

    def run(self, steps: int) -> None:
        """Take that many random steps, fewer if nothing can happen any more, then check the invariants."""
        with self.observations.recording():
            for me in self.federation_spec.members:
                self.advance(me)
            for _ in range(steps):
                self.step()
                if self.done:
                    break
        self.check_invariants()

    @property
    def done(self) -> bool:
        """True if all honest programs have all their sums, or have stopped."""
        programs = [self.programs[me] for me in self.honest]
        return all(len(each.totals) == self.sums or each.stopped is not None for each in programs)

    def step(self) -> None:
        nonempty = [ends for ends, queue in self.queues.items() if queue]
        chance = self.rng.random()
        if not nonempty or chance < 0.02:
            self.disturb()
        else:
            sender, to = self.rng.choice(nonempty)
            self.deliver(sender, to, self.queues[sender, to].popleft())

    def disturb(self) -> None:
        """Restart a member, or change the members."""
        chance = self.rng.random()
        if chance < 0.5:
            self.restart_adversary()
        elif chance < 0.88:
            self.kill(self.rng.choice(self.honest))
        else:
            self.change_members()
        for me in self.federation_spec.members:
            self.advance(me)

    def advance(self, me: str) -> None:
        """Advance a member's program, and queue its frames."""
        if me not in self.programs:
            return
        program = self.programs[me]
        self.call(me, program.advance)
        while (outgoing := program.membership.next_outgoing()) is not None:
            to, data = outgoing[0], bytes(outgoing[1])
            frames = [(to, data)] if me != ADVERSARY else self.adversary.replace_frame(to, data, program.membership)
            for to, frame in frames:
                self.queues.setdefault((me, to), deque()).append(frame)
        if me == ADVERSARY:
            if program.journal.head not in self.old_journals:
                self.old_journals[program.journal.head] = program.journal.to_bytes()
            for to, frame in self.adversary.additional_frames(self.honest, program.membership):
                self.queues.setdefault((me, to), deque()).append(frame)
        else:
            for index, total in enumerate(program.totals):
                if not total:
                    continue
                self.finished.setdefault(index, {}).setdefault(me, set()).add(total)

    def deliver(self, sender: str, to: str, frame: bytes) -> None:
        if to not in self.programs or sender not in self.programs:
            return
        if to == ADVERSARY:
            self.adversary.observe(sender, frame)
        self.call(to, lambda: self.programs[to].membership.receive(sender, frame))
        self.advance(to)

    def call(self, me: str, action: Any) -> None:
        """Run an action of a member, and check invariants 3 and 4."""
        try:
            action()
        except CGDError as error:
            if me != ADVERSARY:
                self.check_accusation(me, error)
        except Exception as error:
            if me != ADVERSARY:
                raise InvariantError(f"{me} crashed: {error!r}") from error
        stopped = self.programs[me].stopped
        if me != ADVERSARY and stopped is not None:
            self.check_accusation(me, stopped)

    def check_accusation(self, me: str, error: CGDError) -> None:
        if isinstance(error, NO_ACCUSATION):
            return
        if isinstance(error, RemoteProtocolError) and error.peer != ADVERSARY:
            raise InvariantError(f"{me} accuses {error.peer}: {error}") from error
        if not isinstance(error, RemoteProtocolError | DisagreementError | MembersChangedError | LocalProtocolError):
            raise InvariantError(f"{me} stopped with an unexpected error: {error!r}") from error

    def kill(self, me: str) -> None:
        """Restart an honest member, with or without its state."""
        keeps_state = me == self.durable or self.rng.random() < 0.7
        if not keeps_state:  # its totals are lost, and may differ later if no other member had finished the sum
            for totals in self.finished.values():
                totals.pop(me, None)
        saved = Journal.from_bytes(self.programs[me].saved) if keeps_state else None
        self.replace(me, Program(me, self.federation_spec, self.sums, saved))

    def restart_adversary(self) -> None:
        saved = Journal.from_bytes(self.rng.choice(list(self.old_journals.values())))
        forged = self.adversary.forge_journal(saved)
        self.replace(ADVERSARY, Program(ADVERSARY, self.federation_spec, self.sums, forged))

    def replace(self, me: str, program: Program) -> None:
        for ends in list(self.queues):
            if me in ends:
                del self.queues[ends]
        self.programs[me] = program

    def change_members(self) -> None:
        """Begin a new epoch for all members at once: without an honest member, with another one, or with the same."""
        present = set(self.federation_spec.members) - {ADVERSARY}
        absent = [name for name in HONEST if name not in present]
        if self.rng.random() < 0.3:
            pass  # the same members: an address has changed
        elif len(present) > 2 and (not absent or self.rng.random() < 0.7):
            present.remove(self.rng.choice(sorted(present - {self.durable})))
        elif absent and len(present) < 4:
            present.add(absent[0])
        else:
            return
        self.federation_spec = federation_spec(tuple(sorted((*present, ADVERSARY))), self.federation_spec.epoch + 1)
        self.honest = tuple(sorted(present))
        for me in list(self.programs):
            if me not in self.federation_spec.members:
                self.replace(me, self.programs[me])
                del self.programs[me]
            else:
                self.call(me, lambda me=me: self.programs[me].membership.adopt(self.federation_spec))
        for me in self.honest:
            if me not in self.programs:
                self.replace(me, Program(me, self.federation_spec, self.sums))

    def check_invariants(self) -> None:
        """Check invariants 1 and 2.

        Raises:
            InvariantError: one does not hold.
        """
        for index, totals in self.finished.items():
            if len(set().union(*totals.values())) > 1:
                raise InvariantError(f"sum {index} has several totals: {totals}")
        journals = [self.programs[me].journal for me in self.honest]
        for one in journals:
            for other in journals:
                common = min(len(one), len(other))
                if one.heads[common] != other.heads[common]:
                    raise InvariantError(f"honest members have different histories of {common} sums")
                ours, theirs = one.states.get(0), other.states.get(0)
                if ours and theirs and ours.steps == theirs.steps and ours.content != theirs.content:
                    raise InvariantError(f"honest members have different states after {ours.steps} steps")
        self.observations.check()


class DirectedSimulation(Simulation):
    """A simulation in which all frames are delivered, except those of the dishonest member that a test replaces."""

    def __init__(self, honest: int = 2, sums: int = 2) -> None:
        super().__init__(0, honest, sums)
        self.adversary.rate, self.adversary.withholds = 0.0, False
        self.errors: dict[str, list[Exception]] = {me: [] for me in self.honest}
        self.alter: Alter = lambda _, frame: frame.message
        """Returns the message that the dishonest member sends to a recipient instead; None for no message."""

    def two_positions(self, to: str, frame: Frame) -> Message:
        """Return a signed position for everybody except "a" that differs from the one for "a"; a value of `alter`."""
        if not isinstance(frame.message, JournalPosition) or to == "a":
            return frame.message
        report = PositionReport.from_bytes(frame.message.content)
        position = replace(report.groups["everyone"], pending_reveal=bytes(32))
        content = replace(report, groups={"everyone": position}).to_bytes()
        signature = self.sign("standing", slot_of(report.view), content)
        return replace(frame.message, content=content, signature=signature)

    def settle(self) -> None:
        """Deliver all frames until no program advances."""
        with self.observations.recording():
            for _ in range(30):  # programs may request the next sum
                for me in self.federation_spec.members:
                    self.advance(me)
                rounds = 0
                while any(self.queues.values()):
                    rounds += 1
                    assert rounds < MAX_ROUNDS, "the members do not stop sending"
                    for (sender, to), queue in list(self.queues.items()):
                        while queue:
                            self.deliver(sender, to, queue.popleft())
        self.observations.check()

    def advance(self, me: str) -> None:
        if me not in self.programs:
            return
        program = self.programs[me]
        self.call(me, program.advance)
        while (outgoing := program.membership.next_outgoing()) is not None:
            to, data = outgoing[0], bytes(outgoing[1])
            if me == ADVERSARY:
                frame = from_bytes(data, me)
                message = self.alter(to, frame)
                if message is None:
                    continue
                data = to_bytes(replace(frame, message=message))
            self.queues.setdefault((me, to), deque()).append(data)

    def call(self, me: str, action: Any) -> None:
        try:
            action()
        except RemoteProtocolError as error:
            if me in self.errors:
                self.errors[me].append(error)

    def restart(self, me: str, journal: Journal | None = None, sums: int | None = None) -> None:
        """Restart a member with this journal, or without."""
        self.replace(me, Program(me, self.federation_spec, self.sums if sums is None else sums, journal))

    def saved_journal(self, me: str) -> Journal:
        """Return a copy of a member's journal."""
        return Journal.from_bytes(self.programs[me].journal.to_bytes())

    def group(self, me: str) -> Group:
        return self.programs[me].membership.group("everyone")

    def totals(self) -> list[list[bytes]]:
        return [self.programs[me].totals for me in self.honest]

    def sign(self, kind: str, slot: bytes, content: bytes) -> bytes:
        """Sign a statement as the dishonest member."""
        return self.adversary.identity.sign(statement(kind, slot, sha256(content).digest()))

    @property
    def view(self) -> bytes:
        view = self.programs[ADVERSARY].membership._view
        return b"" if view is None else view.digest

    def inject(self, to: str, session: bytes, message: Message, number: int = 0) -> None:
        """Send a message as the dishonest member."""
        self.queues.setdefault((ADVERSARY, to), deque()).append(to_bytes(Frame(session, number, message)))


def withhold(*kinds: type[Message]) -> Alter:
    """Return a function that drops all messages of these types."""
    return lambda _, frame: None if isinstance(frame.message, kinds) else frame.message
