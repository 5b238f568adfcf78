"""A reducer that tells members different totals: what it could open by that, and that the digest catches it.

A member that adds up a part of a sum might tell somebody another total than the rest, and so split the members: each
group would move by another gradient, and what they send next would show the difference. The members compare a digest of
the sealed total before anybody shows a key, so a lie must be noticed while nothing is open.

This plays real sessions of the protocol. The liar follows it but for what it says of its part, and is no fool: its own
digests can be made to fit what it told each member.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING, Literal

import numpy as np

from cgd.audit.view import Finding
from cgd.errors import DisagreementError, RemoteProtocolError
from cgd.secagg.certificates import opening_digest
from cgd.secagg.codec import Frame, from_bytes, to_bytes
from cgd.secagg.fixed_point import WORD_TYPES
from cgd.secagg.masking import KEY_BYTES
from cgd.secagg.messages import SESSION_BYTES, Confirm, Ready, Subtotal, SumSpec, Total
from cgd.secagg.session import Session

if TYPE_CHECKING:
    from collections.abc import Collection

    from cgd.audit.view import Scheme
    from cgd.secagg.messages import Opening, PeerId

MEMBERS = ("a", "b", "c", "d")
LIAR = "b"
SIZE = 12

Lie = Literal["to one", "to one, own digests to match", "to all the same", "none"]


class Liar:
    """What a lying reducer does to the frames that it sends; it reads those that it gets, and nothing else."""

    def __init__(self, lie: Lie, deceived: Collection[PeerId]) -> None:
        self._lie, self._deceived = lie, deceived
        self._parts: dict[PeerId, bytes] = {}  # the sealed total of each reducer's part
        self._readies: dict[PeerId, Ready] = {}

    def sees(self, sender: PeerId, data: bytes) -> None:
        """A frame that it gets, or is about to send."""
        match from_bytes(data, sender).message:
            case Ready() as ready:
                self._readies[sender] = ready
            case Total(_, words):
                self._parts[sender] = bytes(words)

    def hears(self, sender: PeerId, data: bytes) -> bytes:
        """What it takes a frame for: to tell all the same, it adds up something else than it was given."""
        self.sees(sender, data)
        frame = from_bytes(data, sender)
        match frame.message:
            case Subtotal(start, words) if self._lie == "to all the same" and sender == MEMBERS[0]:
                return to_bytes(Frame(frame.session, frame.number, Subtotal(start, _bent(words))))
        return data

    def says(self, to: PeerId, data: bytes) -> bytes:
        """What it sends instead."""
        frame = from_bytes(data, LIAR)
        if to not in self._deceived:
            return data
        match frame.message:
            case Total(start, words):
                return to_bytes(Frame(frame.session, frame.number, Total(start, _bent(words))))
            case Confirm() if self._lie == "to one, own digests to match":
                return to_bytes(Frame(frame.session, frame.number, Confirm(self._digest())))
        return data

    def _digest(self) -> bytes:
        """Of the total that a deceived member has."""
        sealed = hashlib.sha256()
        for member, words in sorted(self._parts.items()):
            sealed.update(_bent(words) if member == LIAR else words)
        own, seals = self._readies[LIAR], [ready.seal for _, ready in sorted(self._readies.items())]
        return opening_digest(sealed.digest(), own.spec, own.terms, seals)


def play(lie: Lie, opening: Opening, seed: int) -> dict[PeerId, bool | None]:
    """One sum with a liar: whether each honest member opened the right total, a wrong one (False), or none (None)."""
    rng = random.Random(seed)  # noqa: S311 - a game to be played again, with secrets of nobody
    session = rng.randbytes(SESSION_BYTES)
    keys: dict[PeerId, dict[PeerId, bytes]] = {member: {} for member in MEMBERS}
    for one, other in combinations(MEMBERS, 2):
        keys[one][other] = keys[other][one] = rng.randbytes(KEY_BYTES)
    sessions = {me: Session(me, MEMBERS, session, keys[me]) for me in MEMBERS}
    spec = SumSpec((SIZE,), "float32", 32, 20, "expanded", opening, LIAR if opening == "aggregator" else "")
    secrets = [np.frombuffer(rng.randbytes(4 * SIZE), dtype=WORD_TYPES[32]) for _ in MEMBERS]
    honest = [member for member in MEMBERS if member != LIAR]
    deceived = [rng.choice(honest)] if lie in ("to one", "to one, own digests to match") else []
    for each, secret in zip(sessions.values(), secrets, strict=True):
        each.start(spec, secret.copy())
    _deliver(sessions, Liar(lie, deceived), rng)
    right = np.sum(secrets, axis=0, dtype=WORD_TYPES[32])
    return {
        member: np.array_equal(sessions[member].total, right) if sessions[member].finished else None
        for member in honest
    }


def _deliver(sessions: dict[PeerId, Session], liar: Liar, rng: random.Random) -> None:
    """Every frame arrives, in an order that keeps each sender's own to each recipient."""
    flying: list[tuple[PeerId, PeerId, bytes]] = []
    while True:
        for sender, each in sessions.items():
            while (outgoing := each.next_outgoing()) is not None:
                to, data = outgoing
                if sender == LIAR:
                    liar.sees(LIAR, data)
                    data = liar.says(to, data)
                flying.append((sender, to, data))
        if not flying:
            return
        pair = rng.choice(flying)[:2]
        sender, to, data = flying.pop(next(place for place, each in enumerate(flying) if each[:2] == pair))
        try:
            sessions[to].receive(sender, liar.hears(sender, data) if to == LIAR else data)
        except (RemoteProtocolError, DisagreementError):
            continue  # it gives the sum up


def _bent(words: bytes | bytearray | memoryview) -> bytes:
    """Another total: a bit of the first word is turned."""
    return bytes([words[0] ^ 1]) + bytes(words[1:])


def lie(kind: Lie, scheme: Scheme = "cgd", *, tries: int = 40, seed: int = 0) -> Finding:
    """How many lies are caught: noticed by every honest member, with nothing opened. It succeeds if one goes through.

    Half of the sums are opened by mesh, and half by an aggregator, which is the liar. The scheme makes no difference to
    a secure sum.
    """
    openings: tuple[Opening, Opening] = ("mesh", "aggregator")
    count: Counter[str] = Counter()
    for number in range(tries):
        opened = list(play(kind, openings[number % 2], seed * 1_000_003 + number).values())
        count["caught"] += all(each is None for each in opened)
        count["wrong"] += any(each is False for each in opened)
        count["right"] += all(opened)
    return Finding(
        "a reducer that lies",
        scheme,
        "lies caught",
        count["caught"] / tries,
        0.0,
        count["wrong"] > 0,
        f"{len(MEMBERS)} members; the lie: {kind}",
        f"of {tries} sums, {count['caught']} were given up and opened by nobody, {count['wrong']} opened with a wrong "
        f"total, {count['right']} opened by all with the right one",
    )


def attacks(scheme: Scheme, seed: int = 0) -> list[Finding]:
    """Another total for one member; and the same with digests to match."""
    return [lie("to one", scheme, seed=seed), lie("to one, own digests to match", scheme, seed=seed)]


def controls(scheme: Scheme, seed: int = 0) -> list[Finding]:
    """Sums where there is nothing to catch; they show that not just every sum is given up.

    First one wrong total for everybody, which goes through: any member can have as much by entering a wrong value. Then
    no lie at all.
    """
    return [replace(lie("to all the same", scheme, seed=seed), must_succeed=True), lie("none", scheme, seed=seed)]
