"""A dishonest member among honest ones, without I/O: what it sends may be anything, and the laws must hold.

`World` has honest members, each with a program that wants some sums, and one dishonest member. That one runs the real
protocol, so that it gets far, and a `Liar` replaces what it sends: copied keys, forged history, other words for other
members, keys withheld or shown early, restarts with lies. Honest members are killed and come back; members change.
A random schedule, given by a seed, decides everything. `check_laws` then looks at what happened:

1. Honest members that finish a step have the same bits and the same history.
2. Neither an honest member's addend nor a sum over part of the honest members follows from what the dishonest one saw:
   see `Observations`.
3. Nobody crashes.
4. Whoever accuses a member of having broken the rules accuses the dishonest one.
"""

from __future__ import annotations

import random
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np

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
from cgd.secagg import secure_sum
from cgd.secagg.federation_spec import FederationSpec
from cgd.secagg.identity import Identity
from cgd.secagg.journal import Journal, Step
from cgd.secagg.masking import PairwiseMasks
from cgd.secagg.membership import Membership
from support.liar import Liar
from support.wire import spec

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from cgd.secagg.secure_sum import SecureSum

LIAR = "c"
HONEST = ("a", "b", "d", "e")
SIZE = 3
# What says only that a sum did not come about, or that members differ: no accusation.
NO_ACCUSATION = (PeerAbortedError, PeerLeftError, SettingsError, HubError)


class LawBrokenError(AssertionError):
    """A law does not hold."""


@cache
def _identity(name: str) -> Identity:
    return Identity(sha256(f"agreement {name}".encode()).digest(), sha256(f"signing {name}".encode()).digest())


def federation_spec(members: tuple[str, ...], epoch: int) -> FederationSpec:
    keys = {name: _identity(name).public for name in members}
    return FederationSpec("trial", epoch, members, {"everyone": members}, {"training": "x"}, "1.0", keys)


def addend(member: str, place: int) -> npt.NDArray[Any]:
    words = sha256(f"addend of {member} at {place}".encode()).digest()[: 4 * SIZE]
    return np.frombuffer(words, dtype="<u4").copy()


@dataclass
class Observation:
    """What an honest member has put into one attempt.

    Attributes:
        member: who.
        members: of the sum.
        place: of the sum in the history.
        addend: its digest.
        masks: the stream of each peer: its key and position.
        shown: whether the key of its own mask has left it.
    """

    member: str
    members: tuple[str, ...]
    place: int
    addend: bytes
    masks: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    shown: bool = False


class Observations:
    """What the dishonest member could see of honest members' addends, and whether it hides them; an exact argument.

    What an honest member h sends in an attempt is x_h ± (a stream for each peer) + (a stream of its own). The last is
    hidden until h shows its key. Suppose that
    - streams that two honest members have in common are known to them alone,
    - each such stream is used by the two once, in one attempt, the one adding and the other subtracting it, and
    - of several attempts of a sum in which all honest members have shown their keys, all are over the same honest
      members with the same addends.
    Then for any other addends with the same sum there are other streams that give the same view: a stream of a pair is
    uniform to the dishonest member, and the pairs of one attempt connect all its honest members. `check` checks these
    suppositions on what was really mixed in.
    """

    def __init__(self) -> None:
        self.attempts: dict[tuple[bytes, int], dict[str, Observation]] = {}
        self.known: set[bytes] = set()
        """The keys of streams that the dishonest member has."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch every sum of honest members."""
        add_to, start, share, unseal = (
            PairwiseMasks.add_to,
            secure_sum.SecureSum.start,
            secure_sum.SecureSum._share,
            secure_sum.SecureSum._unseal,
        )
        watched: dict[int, Observation] = {}
        current: list[Observation] = []

        def watched_start(this: SecureSum, described: Any, secret: npt.NDArray[Any], terms: bytes = b"") -> None:
            if this.me != LIAR and this._shares is not None:
                place = int(terms.split(b",")[1])
                digest = sha256(secret.data).digest()
                watched[id(this)] = Observation(this.me, this.members, place, digest)
                this.observation = watched[id(this)]  # type: ignore[attr-defined]
            start(this, described, secret, terms)

        def watched_share(this: SecureSum) -> None:
            observation = getattr(this, "observation", None)
            if observation is not None:
                self.attempts.setdefault((this.said._statement_signer.slot(0), this.number), {})[this.me] = observation
                current[:] = [observation]
            share(this)
            current.clear()

        def watched_add(this: PairwiseMasks, words: npt.NDArray[Any], position: int) -> None:
            if this._me == LIAR:
                self.known |= set(this._keys.values())
            if current:
                current[0].masks = {peer: (key, position) for peer, key in this._keys.items()}
            add_to(this, words, position)

        def watched_unseal(this: SecureSum) -> None:
            observation = getattr(this, "observation", None)
            if observation is not None:
                observation.shown = True
            unseal(this)

        with (
            patch.object(PairwiseMasks, "add_to", watched_add),
            patch.object(secure_sum.SecureSum, "start", watched_start),
            patch.object(secure_sum.SecureSum, "_share", watched_share),
            patch.object(secure_sum.SecureSum, "_unseal", watched_unseal),
        ):
            yield

    def check(self) -> None:
        """Check the suppositions of the argument.

        Raises:
            LawBrokenError: one does not hold.
        """
        used: dict[tuple[bytes, int], list[tuple[tuple[bytes, int], str, str]]] = {}
        opened: dict[int, set[tuple[tuple[str, bytes], ...]]] = {}
        for attempt, observations in self.attempts.items():
            for each in observations.values():
                if len(set(each.masks.values())) != len(each.members) - 1:
                    raise LawBrokenError(f"{each.member} used one stream for two peers, or left one out")
                for peer, stream in each.masks.items():
                    used.setdefault(stream, []).append((attempt, each.member, peer))
                    if peer != LIAR and stream[0] in self.known:
                        raise LawBrokenError(f"the dishonest member has the stream of {each.member} and {peer}")
            honest = {name for each in observations.values() for name in each.members} - {LIAR}
            if honest <= observations.keys() and all(observations[name].shown for name in honest):
                place = next(iter(observations.values())).place
                opened.setdefault(place, set()).add(tuple(sorted((name, observations[name].addend) for name in honest)))
        for stream, uses in used.items():
            if len({attempt for attempt, _, _ in uses}) > 1 or len({frozenset(pair) for _, *pair in uses}) > 1:
                raise LawBrokenError(f"the stream {stream[0].hex()} was used more than once: {uses}")
        for place, sets in opened.items():
            if len(sets) > 1:
                raise LawBrokenError(f"sum {place} was opened over different honest members or addends: {sets}")


class Program:
    """A participant's process: an assembly, and a program that wants one sum after the other."""

    def __init__(self, me: str, held: FederationSpec, sums: int, journal: Journal | None = None) -> None:
        self.me, self.sums = me, sums
        self.membership = Membership(me, _identity(me), held, {} if journal is None else {"everyone": journal})
        self.kept = journal.to_bytes() if journal is not None else Journal().to_bytes()
        self.membership.on_mark = lambda _: self.keep()
        self.totals: list[bytes] = []
        self.stopped: CGDError | None = None

    @property
    def journal(self) -> Journal:
        return self.membership.group("everyone").journal

    def keep(self) -> None:
        """What is on disk: written before our key leaves us, and before our program has a total."""
        self.kept = self.journal.to_bytes()

    def advance(self) -> None:
        group = self.membership.group("everyone")
        pending = group.pending
        if pending is not None and pending.fault is not None:
            if isinstance(pending.fault, MembersChangedError | PeerAbortedError | DisagreementError):
                group.pending = None  # the program tries again
            else:
                self.stopped = pending.fault
                return
        if pending is not None and pending.total is not None and len(self.totals) <= pending.step.number:  # type: ignore[union-attr]
            self.keep()
            self.totals.append(pending.total.tobytes())
            self.journal.remember(0, len(self.totals), lambda total=self.totals[-1]: total)  # type: ignore[misc]
            self.membership.remembered()
        pending = group.pending
        if len(self.totals) < self.sums and (pending is None or pending.over) and group.ready:
            number = len(self.totals)
            self.membership.start(
                "everyone", spec(SIZE), lambda: addend(self.me, number), group.next_epoch, Step(0, number)
            )


class World:
    """Processes and the wires between them; a wire keeps its order, and dies with a process at either end.

    Args:
        seed: of the schedule, or what it is drawn from.
        honest: how many honest members there are.
        sums: how many sums each program wants.
    """

    def __init__(self, seed: int | random.Random, honest: int = 2, sums: int = 2) -> None:
        self.rng = seed if isinstance(seed, random.Random) else random.Random(seed)
        self.sums = sums
        self.honest = HONEST[:honest]
        self.federation_spec = federation_spec(tuple(sorted((*self.honest, LIAR))), 1)
        self.programs = {me: Program(me, self.federation_spec, sums) for me in self.federation_spec.members}
        self.liar = Liar(LIAR, _identity(LIAR), self.rng)
        # One honest member keeps its state and stays: if all who remember are gone, the dishonest one's word is taken.
        self.keeper = self.rng.choice(self.honest)
        self.wires: dict[tuple[str, str], deque[bytes]] = {}
        self.observations = Observations()
        self.finished: dict[int, dict[str, set[bytes]]] = {}
        self.past = {Journal().head: Journal().to_bytes()}
        """Every history that the dishonest member ever had."""

    def run(self, steps: int) -> None:
        """Take that many random steps, fewer if nothing can happen any more, then check the laws."""
        with self.observations.watching():
            for me in self.federation_spec.members:
                self.let_speak(me)
            for _ in range(steps):
                self.step()
                if self.over:
                    break
        self.check_laws()

    @property
    def over(self) -> bool:
        """Whether all honest programs have all their sums, or have stopped."""
        programs = [self.programs[me] for me in self.honest]
        return all(len(each.totals) == self.sums or each.stopped is not None for each in programs)

    def step(self) -> None:
        loaded = [ends for ends, wire in self.wires.items() if wire]
        chance = self.rng.random()
        if not loaded or chance < 0.02:
            self.disturb()
        else:
            sender, to = self.rng.choice(loaded)
            self.deliver(sender, to, self.wires[sender, to].popleft())

    def disturb(self) -> None:
        """Restart somebody, or change the members."""
        chance = self.rng.random()
        if chance < 0.55:
            self.restart_liar()
        elif chance < 0.93:
            self.kill(self.rng.choice(self.honest))
        else:
            self.change_members()
        for me in self.federation_spec.members:
            self.let_speak(me)

    def let_speak(self, me: str) -> None:
        if me not in self.programs:
            return
        program = self.programs[me]
        self.guarded(me, program.advance)
        while (outgoing := program.membership.next_outgoing()) is not None:
            frames = [outgoing] if me != LIAR else self.liar.says(*outgoing, self.programs[LIAR].membership)
            for to, frame in frames:
                self.wires.setdefault((me, to), deque()).append(frame)
        if me == LIAR:
            if program.journal.head not in self.past:
                self.past[program.journal.head] = program.journal.to_bytes()
            for to, frame in self.liar.injects(self.honest, program.membership):
                self.wires.setdefault((me, to), deque()).append(frame)
        else:
            for place, total in enumerate(program.totals):
                self.finished.setdefault(place, {}).setdefault(me, set()).add(total)

    def deliver(self, sender: str, to: str, frame: bytes) -> None:
        if to not in self.programs or sender not in self.programs:
            return
        if to == LIAR:
            self.liar.hears(sender, frame)
        self.guarded(to, lambda: self.programs[to].membership.receive(sender, frame))
        self.let_speak(to)

    def guarded(self, me: str, action: Any) -> None:
        """Laws 3 and 4."""
        try:
            action()
        except CGDError as error:
            if me != LIAR:
                self.check_accusation(me, error)
        except Exception as error:
            if me != LIAR:
                raise LawBrokenError(f"{me} crashed: {error!r}") from error
        stopped = self.programs[me].stopped
        if me != LIAR and stopped is not None:
            self.check_accusation(me, stopped)

    def check_accusation(self, me: str, error: CGDError) -> None:
        if isinstance(error, NO_ACCUSATION):
            return
        if isinstance(error, RemoteProtocolError) and error.peer != LIAR:
            raise LawBrokenError(f"{me} accuses {error.peer}: {error}") from error
        if not isinstance(error, RemoteProtocolError | DisagreementError | MembersChangedError | LocalProtocolError):
            raise LawBrokenError(f"{me} stops without reason: {error!r}") from error

    def kill(self, me: str) -> None:
        keep = me == self.keeper or self.rng.random() < 0.7
        if not keep:  # what it finished is forgotten, and may come out otherwise if nobody else had finished it
            for totals in self.finished.values():
                totals.pop(me, None)
        saved = Journal.from_bytes(self.programs[me].kept) if keep else None
        self.replace(me, Program(me, self.federation_spec, self.sums, saved))

    def restart_liar(self) -> None:
        saved = Journal.from_bytes(self.rng.choice(list(self.past.values())))
        self.replace(LIAR, Program(LIAR, self.federation_spec, self.sums, self.liar.forges(saved)))

    def replace(self, me: str, program: Program) -> None:
        for ends in list(self.wires):
            if me in ends:
                del self.wires[ends]
        self.programs[me] = program

    def change_members(self) -> None:
        """Remove or add an honest member, at all others at once; each of them may die before it knows."""
        known = set(self.federation_spec.members) - {LIAR}
        gone = [name for name in HONEST if name not in known]
        if len(known) > 2 and (not gone or self.rng.random() < 0.7):
            known.remove(self.rng.choice(sorted(known - {self.keeper})))
        elif gone and len(known) < 4:
            known.add(gone[0])
        else:
            return
        self.federation_spec = federation_spec(tuple(sorted((*known, LIAR))), self.federation_spec.epoch + 1)
        self.honest = tuple(sorted(known))
        for me in list(self.programs):
            if me not in self.federation_spec.members:
                self.replace(me, self.programs[me])
                del self.programs[me]
            else:
                self.guarded(me, lambda me=me: self.programs[me].membership.adopt(self.federation_spec))
        for me in self.honest:
            if me not in self.programs:
                self.replace(me, Program(me, self.federation_spec, self.sums))

    def check_laws(self) -> None:
        """Laws 1 and 2.

        Raises:
            LawBrokenError: one is broken.
        """
        for place, totals in self.finished.items():
            if len(set().union(*totals.values())) > 1:
                raise LawBrokenError(f"sum {place} has several totals: {totals}")
        journals = [self.programs[me].journal for me in self.honest]
        for one in journals:
            for other in journals:
                common = min(len(one), len(other))
                if one.heads[common] != other.heads[common]:
                    raise LawBrokenError(f"honest members have different histories of {common} sums")
                ours, theirs = one.states.get(0), other.states.get(0)
                if ours and theirs and ours.steps == theirs.steps and ours.content() != theirs.content():
                    raise LawBrokenError(f"honest members have different states after {ours.steps} steps")
        self.observations.check()
