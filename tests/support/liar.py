"""What a dishonest member says instead of what the protocol would have it say."""

from __future__ import annotations

import json
import os
from collections import deque
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np

from cgd.errors import FrameError
from cgd.secagg.certificates import PendingReveal, Terms
from cgd.secagg.codec import KINDS, Frame, from_bytes, hello_content, ready_content, to_bytes
from cgd.secagg.journal import Journal, Step
from cgd.secagg.masking import seal
from cgd.secagg.messages import (
    NO_SIGNATURE,
    Abort,
    Confirm,
    Goodbye,
    Hello,
    JournalChunk,
    JournalPosition,
    JournalRequest,
    Leave,
    Message,
    PositionsGathered,
    Ready,
    Reason,
    RevealKey,
    Share,
    SignedEvidence,
    Subtotal,
    Total,
)
from cgd.secagg.positions import GroupRow, PositionReport, StateRow
from cgd.secagg.statements import slot_of, statement

if TYPE_CHECKING:
    import random
    from collections.abc import Collection

    from cgd.secagg.identity import Identity
    from cgd.secagg.membership import Membership

Outgoing = tuple[str, bytes]


class Liar:
    """Replaces what a member sends. It has the member's keys, and has seen whatever the member has.

    Args:
        me: the member's name.
        identity: its keys.
        rng: decides.
    """

    def __init__(self, me: str, identity: Identity, rng: random.Random) -> None:
        self.me, self.identity, self.rng = me, identity, rng
        self.rate = rng.choice([0.0, 0.02, 0.1, 0.3])
        """How much of what it sends it replaces."""
        self.withholds = rng.random() < 0.5
        """Whether it likes to keep keys back."""
        self.view = b""
        self._heard: deque[tuple[str, bytes]] = deque(maxlen=40)
        self._sent: deque[Outgoing] = deque(maxlen=40)
        self._late: list[Outgoing] = []

    def hears(self, sender: str, frame: bytes) -> None:
        self._heard.append((sender, frame))

    def says(self, to: str, data: bytes, membership: Membership) -> list[Outgoing]:
        """What goes out in place of a frame for a member."""
        self._sent.append((to, data))
        frame = from_bytes(data, self.me)
        if isinstance(frame.message, RevealKey) and self.withholds and self.rng.random() < 0.4:
            self._late.append((to, data))
            return []
        if self.rng.random() >= self.rate:
            return [(to, data)]
        match self.rng.randrange(6):
            case 0:
                return []
            case 1:
                return [(to, data), (to, data)]
            case 2:
                self._late.append((to, data))
                return []
        self.view = membership._view.digest if membership._view is not None else bytes(32)
        lie = self._lie(frame.message, frame)
        return [(to, to_bytes(replace(frame, message=lie)))]

    def injects(self, honest: Collection[str], membership: Membership) -> list[Outgoing]:
        """What goes out besides: late frames, copies of others' frames, and what it makes up."""
        if self.rng.random() >= max(0.02, self.rate / 2):
            return []
        to = self.rng.choice(sorted(honest))
        kind = self.rng.randrange(5)
        if kind == 0 and self._late:
            return [self._late.pop(self.rng.randrange(len(self._late)))]
        if kind == 1 and self._heard:
            return [(to, self.rng.choice(self._heard)[1])]
        if kind == 2 and self._sent:
            return [(to, self.rng.choice(self._sent)[1])]
        if kind == 3:
            return [(to, self.rng.randbytes(self.rng.choice([0, 10, 48, 60, 200])))]
        sessions = [bytes(16), membership.view]
        group = membership.group("everyone")
        if group.session is not None:
            sessions += [group.session.session] * 3
        number = group.session.number if group.session is not None else 0
        number = max(0, number + self.rng.choice([-1, 0, 0, 0, 1, 2]))
        return [(to, to_bytes(Frame(self.rng.choice(sessions), number, self._invention(honest))))]

    def forges(self, journal: Journal) -> Journal:
        """The past that it comes back with."""
        match self.rng.randrange(8):
            case 0:
                return Journal()
            case 5 | 6 if len(journal):
                self._certify_another_total(journal)
            case 1 if len(journal):  # one more sum than there was, or another total
                entry = journal.entries[-1]
                words = self.rng.randbytes(entry.size)
                forged = replace(entry, words=memoryview(words), opening=self.rng.randbytes(32))
                journal._enter(forged)
            case 2 if len(journal):
                entry = journal.entries[-1]
                journal.entries[-1] = replace(entry, words=memoryview(self.rng.randbytes(entry.size)))
            case 3:
                journal.mark = PendingReveal(len(journal), ("a", "b", self.me), self.rng.randbytes(32))
            case 4 if len(journal):
                steps = self.rng.randrange(4)
                content = self.rng.randbytes(12)
                journal.remember(0, steps, lambda: content)
        return journal

    def _certify_another_total(self, journal: Journal) -> None:
        """Put another total in the place of the last, or behind it, with a certificate that only lacks signatures."""
        last = journal.entries[-1]
        if last.certificate is None:
            return
        behind = self.rng.random() < 0.5
        terms = Terms.from_bytes(last.certificate.terms)
        if behind:
            step = None if terms.step is None else (terms.step[0], terms.step[1] + 1)
            terms = replace(terms, place=terms.place + 1, head=journal.head, step=step)
        words = self.rng.randbytes(last.size)
        keys = {name: self.rng.randbytes(16) for name in last.certificate.keys}
        sealed = np.frombuffer(words, dtype="<u4").copy()
        for key in keys.values():
            seal(sealed, key)
        forged = replace(last.certificate, terms=terms.to_bytes(), keys=keys, sealed=sha256(sealed.data).digest())
        slot = slot_of(forged.view, "everyone", forged.number)
        signatures = {
            name: self.identity.sign(statement("confirm", slot, sha256(forged.opening).digest())) for name in keys
        }
        forged = replace(forged, signatures=signatures)
        if not behind:
            journal.entries.pop()
            journal.heads.pop()
        made = None if terms.step is None else Step(*terms.step)
        entry = replace(last, step=made, words=memoryview(words), opening=forged.opening, certificate=forged)
        journal._enter(entry)

    # Lies about what is said.

    def _lie(self, message: Message, frame: Frame) -> Message:
        match message:
            case Hello():
                return self._other_hello(message)
            case JournalPosition():
                return self._other_standing(message)
            case Ready(spec, commitment, terms, _):
                return self._other_ready(spec, commitment, terms, frame.number)
            case Confirm():
                digest = self.rng.randbytes(32)
                return Confirm(digest, self._sign("confirm", slot_of(self.view, "everyone", frame.number), digest))
            case RevealKey(key):
                return RevealKey(bytes([key[0] ^ 1]) + key[1:])
            case Share(start, words) | Subtotal(start, words) | Total(start, words):
                bent = bytearray(words)
                if bent:
                    bent[self.rng.randrange(len(bent))] ^= 1 << self.rng.randrange(8)
                return type(message)(start, bytes(bent))
            case JournalChunk(start, group, size, words):
                return self._other_piece(start, group, size, bytes(words))
            case PositionsGathered():
                return PositionsGathered(self.rng.randbytes(32))
            case Goodbye(done, ends):
                return Goodbye(not done, ends)
            case SignedEvidence(kind, slot, said):
                return SignedEvidence(
                    kind, slot, said[:1] + tuple((name, self.rng.randbytes(32), sign) for name, _, sign in said)
                )
        return self._invention(("a", "b"))

    def _other_hello(self, hello: Hello) -> Hello:
        heard = [from_bytes(frame, sender).message for sender, frame in self._heard if self._is(frame, Hello)]
        copies = [each.ephemeral for each in heard if isinstance(each, Hello)]
        key = self.rng.choice([*copies, os.urandom(32), bytes(32)])
        if self.rng.random() < 0.5:
            key = bytes([*key[:31], key[31] ^ 0x80])
        lie = replace(hello, ephemeral=key)
        if self.rng.random() < 0.2:
            lie = replace(hello, sections=(("training", "z"),))
        return replace(
            lie, signature=self._sign("hello", slot_of(lie.ephemeral, "hello", lie.epoch), hello_content(lie))
        )

    def _other_standing(self, standing: JournalPosition) -> JournalPosition:
        report = PositionReport.from_bytes(standing.content)
        row = report.groups["everyone"]
        other = self.rng.choice(
            [
                replace(row, length=row.length + 1),
                replace(row, length=max(0, row.length - 1)),
                replace(row, length=row.length + 1, head=self.rng.randbytes(32)),
                replace(row, head=self.rng.randbytes(32)),
                replace(row, mark=self.rng.randbytes(32)),
                replace(row, mark=None),
                replace(row, commitment=self.rng.randbytes(32)),
                replace(row, states=(StateRow(0, 1, 12, False, self.rng.randbytes(32)),)),
                GroupRow(2**60, self.rng.randbytes(32), None, row.commitment),
            ]
        )
        number = report.number if self.rng.random() < 0.8 else report.number + 1
        content = PositionReport(report.view, number, {"everyone": other}).to_bytes()
        signature = self._sign("standing", slot_of(report.view, "", number), content)
        return replace(standing, content=content, signature=signature)

    def _other_ready(self, spec: Any, commitment: bytes, terms: bytes, number: int) -> Ready:
        at = Terms.from_bytes(terms)
        lies = [
            replace(at, place=at.place + 1),
            replace(at, head=self.rng.randbytes(32)),
            replace(at, kept=self.rng.randbytes(32)),
            replace(at, clock=at.clock + 1),
            replace(at, step=(9, 9)),
            replace(at, epoch=at.epoch + 1),
            at,
        ]
        terms = self.rng.choice(lies).to_bytes()
        match self.rng.randrange(4):
            case 0:
                commitment = self.rng.randbytes(32)
            case 1:
                heard = [from_bytes(frame, sender).message for sender, frame in self._heard if self._is(frame, Ready)]
                commitment = self.rng.choice([commitment, *(each.seal for each in heard if isinstance(each, Ready))])
            case 2:
                spec = replace(spec, fraction_bits=spec.fraction_bits - 1)
        content = ready_content(spec, commitment, terms)
        signature = self._sign("ready", slot_of(self.view, "everyone", number), content)
        return Ready(spec, commitment, terms, signature if self.rng.random() < 0.8 else NO_SIGNATURE)

    def _other_piece(self, start: int, group: str, size: int, words: bytes) -> JournalChunk:
        match self.rng.randrange(4):
            case 0:
                return JournalChunk(start, group, size + 100, words)
            case 1 if start == 0 and size == len(words):  # a ledger that is well-formed, with another total
                body = bytearray(words[32:])
                body[-1] ^= 1
                return JournalChunk(0, group, size, sha256(body).digest() + bytes(body))
            case 2 if start == 0 and size == len(words):
                return self._other_ledger(group, words)
        bent = bytearray(words)
        bent[self.rng.randrange(len(bent))] ^= 1
        return JournalChunk(start, group, size, bytes(bent))

    def _other_ledger(self, group: str, words: bytes) -> JournalChunk:
        length = int.from_bytes(words[32:40], "little")
        header = json.loads(words[40 : 40 + length])
        if header["entries"]:
            fields, _, certificate = self.rng.choice(header["entries"])
            fields[self.rng.randrange(1, 3)] += 1
            if certificate is not None and self.rng.random() < 0.5:
                certificate[5].pop(self.rng.choice(sorted(certificate[5])))
        text = json.dumps(header).encode()
        body = len(text).to_bytes(8, "little") + text + words[40 + length :]
        content = sha256(body).digest() + body
        return JournalChunk(0, group, len(content), content)

    # What it makes up.

    def _invention(self, honest: Collection[str]) -> Message:
        rng = self.rng
        inventions: list[Message] = [
            Abort(rng.choice(list(Reason))),
            Leave(),
            RevealKey(rng.randbytes(16)),
            Confirm(rng.randbytes(32), rng.randbytes(64)),
            JournalRequest("everyone", rng.choice([0, 1, 2, 2**40]), rng.random() < 0.5),
            JournalRequest("column-0"),
            JournalChunk(0, "everyone", 8, bytes(8)),
            JournalChunk(0, "nobody", 8, bytes(8)),
            Goodbye(rng.random() < 0.5, (("everyone", 1, rng.randbytes(32)),)),
            Share(0, rng.randbytes(12)),
            Subtotal(rng.choice([0, 1, 2]), rng.randbytes(4)),
            Total(rng.choice([0, 1, 2]), rng.randbytes(4)),
            JournalPosition(b"[]", rng.randbytes(64)),
            PositionsGathered(rng.randbytes(32)),
            self._accusation(honest),
        ]
        return rng.choice(inventions)

    def _accusation(self, honest: Collection[str]) -> SignedEvidence:
        """What would convict an honest member if its signatures were not checked."""
        victim = self.rng.choice(sorted(honest))
        slot = self.rng.randbytes(32)
        twice = tuple((victim, self.rng.randbytes(32), self._sign("ready", slot, b"")) for _ in range(2))
        heard = [from_bytes(frame, sender).message for sender, frame in self._heard if self._is(frame, SignedEvidence)]
        if heard and self.rng.random() < 0.5:
            seen = self.rng.choice(heard)
            if isinstance(seen, SignedEvidence):
                return replace(seen, slot=slot)
        return SignedEvidence("ready", slot, twice)

    def _sign(self, kind: str, slot: bytes, content: bytes) -> bytes:
        return self.identity.sign(statement(kind, slot, sha256(content).digest()))

    def _is(self, data: bytes, kind: type[Message]) -> bool:
        if len(data) < 48 or data[4] != KINDS.index(kind) + 1:
            return False
        try:
            from_bytes(data, "")
        except FrameError:
            return False
        return True
