"""Random schedules of a federation with a quorum, without I/O: members are killed, stopped and cut off, and come back.

As in `support.dishonest`, one member may be dishonest: an `Adversary` replaces its messages. What is new: every member
notices at another time that it does not hear a peer (`Membership.set_absent`), frames over a broken connection wait
until it is repaired, and programs that were left behind continue from the stored state, in the same process.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np

from cgd.errors import CGDError, RemoteProtocolError
from cgd.secagg.codec import from_bytes
from cgd.secagg.completion import InterruptedSum
from cgd.secagg.journal import Journal
from cgd.secagg.journal_entry import Step
from cgd.secagg.messages import Attendance, CompleteSum, JournalPosition, KeyShare
from cgd.secagg.positions import Participation, PositionReport
from cgd.secagg.statements import slot_of
from support.adversary import Adversary
from support.dishonest import Simulation
from support.observations import InvariantError, Observations
from support.summing_program import SIZE, Program, _identity, addend, federation_spec, gradient_spec
from support.wire import spec

if TYPE_CHECKING:
    from collections.abc import Collection

    from cgd.secagg.codec import Frame
    from cgd.secagg.federation_spec import FederationSpec, Identity
    from cgd.secagg.messages import Message

PERIOD_BYTES = 8
NAMES = ("a", "b", "c", "d", "e", "f", "g")


def quorum_spec(count: int, quorum: int) -> FederationSpec:
    return replace(federation_spec(NAMES[:count], 1), quorum=quorum)


class QuorumProgram(Program):
    """A program that counts in every period, and continues from the stored state if others have gone on without it."""

    def _restore(self) -> None:
        self._restored, state = True, self.journal.states.get(0)
        if state is not None:
            missing = state.steps - len(self.totals)
            self.totals += [b""] * (missing - 1) + [state.content[-4 * SIZE :]] * (missing > 0)
            self._counted_epoch = int.from_bytes(state.content[: -4 * SIZE], "little")
            self.membership.group("everyone").skip(0, state.steps)

    def _request(self) -> None:
        group, state = self.membership.group("everyone"), self.journal.states.get(0)
        if state is not None and state.steps > len(self.totals):
            self._restore()
        number = len(self.totals)
        if number >= self.sums or not group.next_sum_known:
            return
        settings, encode = gradient_spec(), partial(addend, self.me, number)
        if group.next_epoch != self._counted_epoch:
            settings = spec(1 + group.next_addends)
            encode = partial(np.ones, settings.size, dtype="<u4")
        self.membership.start("everyone", settings, encode, group.next_epoch, Step(0, number))

    def _take(self, pending: Any) -> None:
        self.save()
        if not pending.spec.weighted:
            self._counted_epoch = pending.epoch
        elif pending.step.number == len(self.totals):
            self.totals.append(pending.total.tobytes())
            content = self._counted_epoch.to_bytes(PERIOD_BYTES, "little") + self.totals[-1]
            self.journal.save_state(0, len(self.totals), content)
            self.membership.state_saved()


class QuorumAdversary(Adversary):
    """Lies also about who is present, and about sums that were interrupted."""

    def __init__(self, me: str, identity: Identity, rng: random.Random) -> None:
        super().__init__(me, identity, rng)
        # A member that lies often is soon proved to be dishonest, and nothing is summed any more.
        self.rate, self.withholds = rng.choice([0.0, 0.0, 0.01, 0.1]), rng.random() < 0.7

    def _alter(self, message: Message, frame: Frame) -> Message:
        rng = self.rng
        match message:
            case Attendance(number, members, processes, absent, begun):
                others = tuple(sorted(rng.sample(NAMES[:5], rng.randrange(1, 5))))
                number = max(0, number + rng.choice([-1, 0, 0, 1, 2]))
                kept = (members, processes) if rng.random() < 0.5 else (others, rng.choice([processes, bytes(32)]))
                return Attendance(number, *kept, rng.choice([absent, others]), rng.random() < 0.5 or begun)
            case KeyShare(share):
                return KeyShare(bytes([share[0] ^ 1]) + share[1:])
            case CompleteSum(group, content):
                return CompleteSum(group, content.replace(b"0", b"1", 1) if rng.random() < 0.5 else content[:-3])
            case JournalPosition() if rng.random() < 0.5:
                return self._alter_participation(message)
        return super()._alter(message, frame)

    def _alter_participation(self, message: JournalPosition) -> JournalPosition:
        rng, report = self.rng, PositionReport.from_bytes(message.content)
        position = report.groups["everyone"]
        own = position.attendance or Participation(0)
        other = rng.choice(
            [
                replace(own, started=own.started + rng.choice([-1, 1, 5])) if own.started else own,
                replace(own, revealed_in=own.revealed_in + 1),
                replace(own, members=NAMES[:3]),
                replace(own, material=rng.randbytes(32), has_total=True),
                replace(own, material=None, has_total=False),
            ]
        )
        pending = rng.choice([position.pending_reveal, position.pending_reveal, None, rng.randbytes(32)])
        altered = replace(position, attendance=other, pending_reveal=pending)
        content = PositionReport(report.view, report.number, {"everyone": altered}).to_bytes()
        signature = self._sign("standing", slot_of(report.view, "", report.number), content)
        return replace(message, content=content, signature=signature)


class QuorumObservations(Observations):
    """Counts a self-mask key as revealed if the dishonest member has it, or as many shares of it as the quorum."""

    def __init__(self, quorum: int, dishonest: Collection[str]) -> None:
        super().__init__(dishonest)
        self.quorum = quorum
        self.keys: set[bytes] = set()
        self.shares: dict[bytes, dict[bytes, set[str]]] = {}

    def add_completion(self, content: bytes) -> None:
        """Record what the dishonest member learns from a `CompleteSum`."""
        try:
            found = InterruptedSum.from_bytes(content)
        except ValueError:
            return
        self.keys |= {sha256(key).digest() for key in found.keys.values()}
        for name, shares in found.shares.items():
            if name in found.commitments:
                self.shares.setdefault(found.commitments[name], {}).setdefault(b"", set()).update(shares)

    def check(self) -> None:
        for attempt in self.attempts.values():
            for each in attempt.values():
                commitment = each.commitment
                holders = self.shares.get(commitment, {}).get(b"", set()) | self.dishonest
                each.revealed |= commitment in self.keys or len(holders) >= self.quorum
        super().check()


class QuorumSimulation(Simulation):
    """Members and the connections between them; every decision is drawn from a seed.

    Args:
        seed: the seed of the schedule.
        count: the number of members.
        quorum: the quorum.
        sums: the number of steps of each program.
        dishonest: the dishonest members, who share what they learn.
    """

    def __init__(self, seed: int, count: int, quorum: int, sums: int = 5, dishonest: str = "") -> None:
        self.rng = random.Random(seed)
        self.sums, self.dishonest = sums, frozenset(dishonest)
        self.federation_spec = quorum_spec(count, quorum)
        members = self.federation_spec.members
        self.honest = tuple(name for name in members if name not in dishonest)
        self.programs: dict[str, Program] = {}
        self.saved: dict[str, bytes] = {}
        for me in members:
            self.programs[me] = QuorumProgram(me, self.federation_spec, sums)
        self.adversaries = {me: QuorumAdversary(me, _identity(me), self.rng) for me in dishonest}
        self.queues: dict[tuple[str, str], deque[bytes]] = {}
        self.learned = QuorumObservations(quorum, self.dishonest)
        self.observations = self.learned
        self.finished: dict[int, dict[str, set[bytes]]] = {}
        self.old_journals = {Journal().head: Journal().to_bytes()}
        self.cuts: set[frozenset[str]] = set()
        self.stopped: set[str] = set()
        self.durable = members[0]
        self.unrest = self.rng.choice([0.003, 0.008, 0.02])
        """The part of the steps in which something fails or is repaired."""
        self.sizes: set[int] = set()
        """The numbers of members of the views in which a sum was finished."""

    def run(self, steps: int) -> None:
        with self.observations.recording():
            self.begin()
            for _ in range(steps):
                self.step()
                if self.done:
                    break
        self.check_invariants()

    def begin(self) -> None:
        """Take the first step, which needs all members, in most schedules without faults."""
        rates = {me: (each.rate, each.withholds) for me, each in self.adversaries.items()}
        for each in self.adversaries.values():
            each.rate, each.withholds = 0.0, False
        for me in self.federation_spec.members:
            self.advance(me)
        for _ in range(2000 if self.rng.random() < 0.9 else 0):
            if all(each.totals for each in self.programs.values()):
                break
            self.deliver_one()
        for me, (rate, withholds) in rates.items():
            self.adversaries[me].rate, self.adversaries[me].withholds = rate, withholds

    def settle(self, max_steps: int = 60_000) -> None:
        """Repair everything, and run until all honest programs have all sums and one history."""
        with self.observations.recording():
            self.cuts.clear()
            self.stopped.clear()
            for me in self.federation_spec.members:
                if me not in self.programs:
                    self.start(me)
            for count in range(max_steps):
                if count % 200 == 0:
                    for me in self.federation_spec.members:
                        self.tick(me)
                    if self.done and len({self.programs[me].journal.final_digest() for me in self.honest}) == 1:
                        break
                self.deliver_one()
            else:
                raise InvariantError(
                    str({me: each.membership.waiting_for("everyone") for me, each in self.programs.items()})
                )
        self.check_invariants()

    @property
    def done(self) -> bool:
        programs = [self.programs.get(me) for me in self.honest]
        return all(
            each is not None and (len(each.totals) == self.sums or each.stopped is not None) for each in programs
        )

    def step(self) -> None:
        chance = self.rng.random()
        if chance < self.unrest:
            self.disturb()
        elif chance < self.unrest + 0.15:
            self.tick(self.rng.choice(self.federation_spec.members))
        else:
            self.deliver_one()

    def deliver_one(self) -> None:
        ready = [ends for ends, queue in self.queues.items() if queue and self.is_connected(*ends)]
        if ready:
            sender, to = self.rng.choice(ready)
            self.deliver(sender, to, self.queues[sender, to].popleft())

    def is_connected(self, one: str, other: str) -> bool:
        reachable = other in self.programs and one in self.programs and other not in self.stopped
        return reachable and one not in self.stopped and frozenset((one, other)) not in self.cuts

    def tick(self, me: str) -> None:
        """Let a member notice whom it hears."""
        if me in self.programs and me not in self.stopped:
            silent = {peer for peer in self.federation_spec.members if peer != me and not self.is_connected(me, peer)}
            self.call(me, lambda: self.programs[me].membership.set_absent(silent))
            self.advance(me)

    def disturb(self) -> None:
        members = self.federation_spec.members
        me = self.rng.choice(members)
        match self.rng.randrange(7):
            case 0 if me in self.programs:
                self.kill(me)
            case 1:  # restarted at once, and so are those that stopped with an error
                for name in [name for name, each in self.programs.items() if name == me or each.stopped is not None]:
                    self.kill(name)
                    self.start(name)
            case 2:
                self.stopped ^= {me}
            case 3:
                self.cuts ^= {frozenset(self.rng.sample(members, 2))}
            case 4:  # into two or three parts
                parts = {name: self.rng.randrange(self.rng.choice([2, 3])) for name in members}
                self.cuts = {frozenset((x, y)) for x in members for y in members if x < y and parts[x] != parts[y]}
            case _:
                self.cuts.clear()
                self.stopped.clear()
                for name in members:
                    if name in self.programs and self.programs[name].stopped is not None:
                        self.kill(name)
                    if name not in self.programs:
                        self.start(name)

    def kill(self, me: str) -> None:
        self.saved[me] = self.programs.pop(me).saved
        for ends in list(self.queues):
            if me in ends:
                del self.queues[ends]

    def start(self, me: str) -> None:
        journal = Journal.from_bytes(self.saved[me])
        if me in self.dishonest:
            chosen = Journal.from_bytes(self.rng.choice(list(self.old_journals.values())))
            journal = self.adversaries[me].forge_journal(chosen)
        self.programs[me] = QuorumProgram(me, self.federation_spec, self.sums, journal)
        self.advance(me)

    def advance(self, me: str) -> None:
        if me in self.stopped or me not in self.programs:
            return
        program, adversary = self.programs[me], self.adversaries.get(me)
        self.call(me, program.advance)
        while (outgoing := program.membership.next_outgoing()) is not None:
            to, data = outgoing[0], bytes(outgoing[1])
            frames = [(to, data)] if adversary is None else adversary.replace_frame(to, data, program.membership)
            for to, frame in frames:
                self.queues.setdefault((me, to), deque()).append(frame)
        if adversary is None:
            for index, total in enumerate(program.totals):
                if total:
                    self.finished.setdefault(index, {}).setdefault(me, set()).add(total)
        else:
            self.old_journals.setdefault(program.journal.head, program.journal.to_bytes())
            for to, frame in adversary.additional_frames(self.honest, program.membership):
                self.queues.setdefault((me, to), deque()).append(frame)
        self.sizes |= {entry.addends for entry in program.journal.entries}

    def call(self, me: str, action: Any) -> None:
        try:
            action()
        except CGDError as error:
            self.check_accusation(me, error)
        except Exception as error:
            if me not in self.dishonest:
                raise InvariantError(f"{me} crashed: {error!r}") from error
        stopped = self.programs[me].stopped
        if stopped is not None:
            self.check_accusation(me, stopped)

    def check_accusation(self, me: str, error: CGDError) -> None:
        accused = isinstance(error, RemoteProtocolError) and error.peer in self.dishonest
        if me not in self.dishonest and not accused:
            super().check_accusation(me, error)

    def check_invariants(self) -> None:
        honest, self.honest = self.honest, tuple(me for me in self.honest if me in self.programs)
        super().check_invariants()
        self.honest = honest

    def deliver(self, sender: str, to: str, frame: bytes) -> None:
        if to in self.dishonest:
            self.adversaries[to].observe(sender, frame)
            try:
                message = from_bytes(frame, sender).message
            except CGDError:
                message = None
            if isinstance(message, CompleteSum):
                self.learned.add_completion(message.content)
        self.call(to, lambda: self.programs[to].membership.receive(sender, frame))
        self.advance(to)


class DirectedQuorum(QuorumSimulation):
    """Members whose frames are all delivered, except between those that a test has cut off or that are gone."""

    def __init__(self, count: int = 5, quorum: int = 4, sums: int = 3) -> None:
        super().__init__(0, count, quorum, sums)
        self.lost: Any = lambda _sender, _to, _message: False
        """Returns whether a message is lost."""

    def advance(self, me: str) -> None:
        super().advance(me)
        for (sender, to), queue in self.queues.items():
            if sender == me:
                kept = [data for data in queue if not self.lost(sender, to, from_bytes(data, sender).message)]
                self.queues[sender, to] = deque(kept)

    def exchange(self, *, ticks: int = 3) -> None:
        """Deliver all frames until nothing changes; all members notice whom they hear before, and in between."""
        with self.observations.recording():
            for _ in range(ticks):
                for me in self.federation_spec.members:
                    self.tick(me)
                while ready := [ends for ends, queue in self.queues.items() if queue and self.is_connected(*ends)]:
                    for sender, to in ready:
                        while self.queues.get((sender, to)):
                            self.deliver(sender, to, self.queues[sender, to].popleft())

    def remove(self, *names: str) -> None:
        """Kill members."""
        for name in names:
            self.kill(name)

    def steps(self) -> dict[str, int]:
        """Return the number of steps of each running program."""
        return {me: len(program.totals) for me, program in self.programs.items()}
