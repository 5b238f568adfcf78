"""Equivocation: a reducer sends different totals to different members. The digest must detect it before the sum opens.

A member that reduces a part of a sum could send one member another total than the rest: the members would then move by
different gradients, and their next addends would reveal the difference. The members compare a digest of the masked
total before any of them reveals its self-mask key, so equivocation must be detected while nothing is open.

The attack runs real sessions of the protocol. The malicious reducer follows it except for the total of its part; its
own digests can match the total that it sent to each member.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING, Literal

import numpy as np

from cgd.audit.results import AttackResult
from cgd.errors import DisagreementError, RemoteProtocolError
from cgd.secagg.certificates import attempt_digest
from cgd.secagg.codec import Frame, from_bytes, to_bytes
from cgd.secagg.fixed_point import WORD_TYPES
from cgd.secagg.masking import KEY_BYTES
from cgd.secagg.messages import SESSION_BYTES, Confirm, Ready, Subtotal, SumSpec, Total
from cgd.secagg.session import Session

if TYPE_CHECKING:
    from collections.abc import Collection

    from cgd.audit.view import Scheme
    from cgd.secagg.messages import Buffer, Opening, PeerId

MEMBERS = ("a", "b", "c", "d")
ATTACKER = "b"
SIZE = 12

Lie = Literal["to one", "to one, own digests to match", "to all the same", "none"]
"""The member or members to which a wrong total is sent."""


class MaliciousReducer:
    """Changes the frames that the reducer sends, given the frames that it received."""

    def __init__(self, lie: Lie, deceived: Collection[PeerId]) -> None:
        self._lie, self._deceived = lie, deceived
        self._parts: dict[PeerId, bytes] = {}  # the masked total of each reducer's part
        self._readies: dict[PeerId, Ready] = {}

    def observe(self, sender: PeerId, data: Buffer) -> None:
        """Note a frame that it received, or is about to send."""
        match from_bytes(data, sender).message:
            case Ready() as ready:
                self._readies[sender] = ready
            case Total(_, words):
                self._parts[sender] = bytes(words)

    def change_received(self, sender: PeerId, data: Buffer) -> Buffer:
        """Return the frame that it processes instead: to send all the same wrong total, it changes a subtotal."""
        self.observe(sender, data)
        frame = from_bytes(data, sender)
        match frame.message:
            case Subtotal(start, words) if self._lie == "to all the same" and sender == MEMBERS[0]:
                return to_bytes(Frame(frame.session, frame.number, Subtotal(start, _flip_bit(words))))
        return data

    def change_sent(self, to: PeerId, data: Buffer) -> Buffer:
        """Return the frame that it sends instead."""
        frame = from_bytes(data, ATTACKER)
        if to not in self._deceived:
            return data
        match frame.message:
            case Total(start, words):
                return to_bytes(Frame(frame.session, frame.number, Total(start, _flip_bit(words))))
            case Confirm() if self._lie == "to one, own digests to match":
                return to_bytes(Frame(frame.session, frame.number, Confirm(self._digest())))
        return data

    def _digest(self) -> bytes:
        """Return the digest of the total that a deceived member has."""
        masked = hashlib.sha256()
        for member, words in sorted(self._parts.items()):
            masked.update(_flip_bit(words) if member == ATTACKER else words)
        own = self._readies[ATTACKER]
        commitments = {name: ready.commitment for name, ready in self._readies.items()}
        return attempt_digest(masked.digest(), own.spec, own.terms, commitments)


def run_sum(lie: Lie, opening: Opening, seed: int) -> dict[PeerId, bool | None]:
    """Run one sum, and return for each honest member whether it opened the right total; None if it opened nothing."""
    rng = random.Random(seed)  # noqa: S311 - repeatable, and the secrets are nobody's
    session = rng.randbytes(SESSION_BYTES)
    keys: dict[PeerId, dict[PeerId, bytes]] = {member: {} for member in MEMBERS}
    for one, other in combinations(MEMBERS, 2):
        keys[one][other] = keys[other][one] = rng.randbytes(KEY_BYTES)
    sessions = {me: Session(me, MEMBERS, session, keys[me]) for me in MEMBERS}
    spec = SumSpec((SIZE,), "float32", 32, 20, "pairwise", opening, ATTACKER if opening == "aggregator" else "")
    secrets = [np.frombuffer(rng.randbytes(4 * SIZE), dtype=WORD_TYPES[32]) for _ in MEMBERS]
    honest = [member for member in MEMBERS if member != ATTACKER]
    deceived = [rng.choice(honest)] if lie in ("to one", "to one, own digests to match") else []
    for each, secret in zip(sessions.values(), secrets, strict=True):
        each.start(spec, secret.copy())
    _deliver(sessions, MaliciousReducer(lie, deceived), rng)
    right = np.sum(secrets, axis=0, dtype=WORD_TYPES[32])
    return {
        member: np.array_equal(sessions[member].total, right) if sessions[member].finished else None
        for member in honest
    }


def _deliver(sessions: dict[PeerId, Session], reducer: MaliciousReducer, rng: random.Random) -> None:
    """Deliver all frames in a random order, which keeps the order between each sender and recipient."""
    in_flight: list[tuple[PeerId, PeerId, Buffer]] = []
    while True:
        for sender, each in sessions.items():
            while (outgoing := each.next_outgoing()) is not None:
                to, data = outgoing
                if sender == ATTACKER:
                    reducer.observe(ATTACKER, data)
                    data = reducer.change_sent(to, data)
                in_flight.append((sender, to, data))
        if not in_flight:
            return
        pair = rng.choice(in_flight)[:2]
        sender, to, data = in_flight.pop(next(place for place, each in enumerate(in_flight) if each[:2] == pair))
        try:
            sessions[to].receive(sender, reducer.change_received(sender, data) if to == ATTACKER else data)
        except (RemoteProtocolError, DisagreementError):
            continue  # the member aborts the sum


def _flip_bit(words: bytes | bytearray | memoryview) -> bytes:
    """Return another total: one bit of the first word differs."""
    return bytes([words[0] ^ 1]) + bytes(words[1:])


def equivocate(lie: Lie, scheme: Scheme = "cgd", *, tries: int = 40, seed: int = 0) -> AttackResult:
    """Measure the fraction of sums in which every honest member detects the lie and opens nothing.

    The attack succeeds if an honest member opens a wrong total. Half of the sums are opened by mesh, half by an
    aggregator, which is the malicious reducer. The scheme makes no difference to a secure sum.
    """
    openings: tuple[Opening, Opening] = ("mesh", "aggregator")
    count: Counter[str] = Counter()
    for number in range(tries):
        opened = list(run_sum(lie, openings[number % 2], seed * 1_000_003 + number).values())
        count["caught"] += all(each is None for each in opened)
        count["wrong"] += any(each is False for each in opened)
        count["right"] += all(opened)
    return AttackResult(
        "a malicious reducer",
        scheme,
        "lies caught",
        count["caught"] / tries,
        0.0,
        count["wrong"] > 0,
        f"{len(MEMBERS)} members; the lie: {lie}",
        f"of {tries} sums, {count['caught']} were aborted by all and not opened, {count['wrong']} were opened with a "
        f"wrong total, {count['right']} were opened by all with the right one",
    )


def attacks(scheme: Scheme, seed: int = 0) -> list[AttackResult]:
    """Return the results with another total for one member, and the same with matching digests."""
    return [equivocate("to one", scheme, seed=seed), equivocate("to one, own digests to match", scheme, seed=seed)]


def controls(scheme: Scheme, seed: int = 0) -> list[AttackResult]:
    """Return the results without equivocation, which show that sums are not aborted without a reason.

    The first has the same wrong total for everybody, which cannot be detected: any member can cause as much by entering
    a wrong value. The second has no lie.
    """
    same = equivocate("to all the same", scheme, seed=seed)
    return [replace(same, must_succeed=True), equivocate("none", scheme, seed=seed)]
