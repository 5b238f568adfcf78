"""The messages of a dishonest member: altered, withheld, delayed, copied and forged ones."""

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
from cgd.secagg.journal import Journal
from cgd.secagg.journal_entry import Step
from cgd.secagg.masking import add_self_mask
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
from cgd.secagg.positions import GroupPosition, PositionReport, StateSummary
from cgd.secagg.statements import slot_of, statement

if TYPE_CHECKING:
    import random
    from collections.abc import Collection

    from cgd.secagg.federation_spec import Identity
    from cgd.secagg.membership import Membership

ADVERSARY = "c"
Outgoing = tuple[str, bytes]


class Adversary:
    """Replaces the messages of a member. It has the member's keys, and all frames that the member received.

    Args:
        me: the name of the member.
        identity: its keys.
        rng: decides what to do.
    """

    def __init__(self, me: str, identity: Identity, rng: random.Random) -> None:
        self.me, self.identity, self.rng = me, identity, rng
        self.rate = rng.choice([0.0, 0.02, 0.1, 0.3])
        """The fraction of sent messages that it replaces."""
        self.withholds = rng.random() < 0.5
        """True if it often withholds its self-mask keys."""
        self.view = b""
        self._received: deque[tuple[str, bytes]] = deque(maxlen=40)
        self._sent: deque[Outgoing] = deque(maxlen=40)
        self._delayed: list[Outgoing] = []

    def observe(self, sender: str, frame: bytes) -> None:
        self._received.append((sender, frame))

    def replace_frame(self, to: str, data: bytes, membership: Membership) -> list[Outgoing]:
        """Return the frames to send instead of this one."""
        self._sent.append((to, data))
        frame = from_bytes(data, self.me)
        if isinstance(frame.message, RevealKey) and self.withholds and self.rng.random() < 0.4:
            self._delayed.append((to, data))
            return []
        if self.rng.random() >= self.rate:
            return [(to, data)]
        match self.rng.randrange(6):
            case 0:
                return []
            case 1:
                return [(to, data), (to, data)]
            case 2:
                self._delayed.append((to, data))
                return []
        self.view = membership._view.digest if membership._view is not None else bytes(32)
        return [(to, to_bytes(replace(frame, message=self._alter(frame.message, frame))))]

    def additional_frames(self, honest: Collection[str], membership: Membership) -> list[Outgoing]:
        """Return additional frames: delayed ones, copies of own and received ones, random bytes, forged ones."""
        if self.rng.random() >= max(0.02, self.rate / 2):
            return []
        to = self.rng.choice(sorted(honest))
        kind = self.rng.randrange(5)
        if kind == 0 and self._delayed:
            return [self._delayed.pop(self.rng.randrange(len(self._delayed)))]
        if kind == 1 and self._received:
            return [(to, self.rng.choice(self._received)[1])]
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
        return [(to, to_bytes(Frame(self.rng.choice(sessions), number, self._forge_message(honest))))]

    def forge_journal(self, journal: Journal) -> Journal:
        """Return the journal that it restarts with."""
        match self.rng.randrange(8):
            case 0:
                return Journal()
            case 5 | 6 if len(journal):
                self._certify_another_total(journal)
            case 1 if len(journal):  # a sum that did not happen
                entry = journal.entries[-1]
                words = self.rng.randbytes(entry.size)
                forged = replace(entry, words=memoryview(words), attempt=self.rng.randbytes(32))
                journal._append_entry(forged)
            case 2 if len(journal):
                entry = journal.entries[-1]
                journal.entries[-1] = replace(entry, words=memoryview(self.rng.randbytes(entry.size)))
            case 3:
                journal.pending_reveal = PendingReveal(len(journal), ("a", "b", self.me), self.rng.randbytes(32))
            case 4 if len(journal):
                steps = self.rng.randrange(4)
                content = self.rng.randbytes(12)
                journal.save_state(0, steps, content)
        return journal

    def _certify_another_total(self, journal: Journal) -> None:
        """Replace the last total, or append one, with a certificate that lacks only the others' signatures."""
        last = journal.entries[-1]
        if last.certificate is None:
            return
        appends = self.rng.random() < 0.5
        terms = Terms.from_bytes(last.certificate.terms)
        if appends:
            step = None if terms.step is None else (terms.step[0], terms.step[1] + 1)
            terms = replace(terms, index=terms.index + 1, head=journal.head, step=step)
        words = self.rng.randbytes(last.size)
        keys = {name: self.rng.randbytes(16) for name in last.certificate.keys}
        masked = np.frombuffer(words, dtype="<u4").copy()
        for key in keys.values():
            add_self_mask(masked, key)
        masked_digest = sha256(masked.data).digest()
        forged = replace(last.certificate, terms=terms.to_bytes(), keys=keys, masked_digest=masked_digest)
        slot = slot_of(forged.view, "everyone", forged.number)
        signatures = {
            name: self.identity.sign(statement("confirm", slot, sha256(forged.attempt).digest())) for name in keys
        }
        forged = replace(forged, signatures=signatures)
        if not appends:
            journal.entries.pop()
            journal.heads.pop()
        entry_step = None if terms.step is None else Step(*terms.step)
        entry = replace(last, step=entry_step, words=memoryview(words), attempt=forged.attempt, certificate=forged)
        journal._append_entry(entry)

    # Altered messages.

    def _alter(self, message: Message, frame: Frame) -> Message:
        match message:
            case Hello():
                return self._alter_hello(message)
            case JournalPosition():
                return self._alter_position(message)
            case Ready(spec, commitment, terms, _):
                return self._alter_ready(spec, commitment, terms, frame.number)
            case Confirm():
                digest = self.rng.randbytes(32)
                return Confirm(digest, self._sign("confirm", slot_of(self.view, "everyone", frame.number), digest))
            case RevealKey(key):
                return RevealKey(bytes([key[0] ^ 1]) + key[1:])
            case Share(start, words) | Subtotal(start, words) | Total(start, words):
                altered = bytearray(words)
                if altered:
                    altered[self.rng.randrange(len(altered))] ^= 1 << self.rng.randrange(8)
                return type(message)(start, bytes(altered))
            case JournalChunk(start, group, size, words):
                return self._alter_chunk(start, group, size, bytes(words))
            case PositionsGathered():
                return PositionsGathered(self.rng.randbytes(32))
            case Goodbye(done, ends):
                return Goodbye(not done, ends)
            case SignedEvidence(kind, slot, statements):
                forged = tuple((name, self.rng.randbytes(32), signature) for name, _, signature in statements)
                return SignedEvidence(kind, slot, statements[:1] + forged)
        return self._forge_message(("a", "b"))

    def _alter_hello(self, hello: Hello) -> Hello:
        received = [from_bytes(frame, sender).message for sender, frame in self._received if self._is(frame, Hello)]
        copies = [each.ephemeral for each in received if isinstance(each, Hello)]
        key = self.rng.choice([*copies, os.urandom(32), bytes(32)])
        if self.rng.random() < 0.5:
            key = bytes([*key[:31], key[31] ^ 0x80])
        altered = replace(hello, ephemeral=key)
        if self.rng.random() < 0.2:
            altered = replace(hello, sections=(("training", "z"),))
        slot = slot_of(altered.ephemeral, "hello", altered.epoch)
        return replace(altered, signature=self._sign("hello", slot, hello_content(altered)))

    def _alter_position(self, message: JournalPosition) -> JournalPosition:
        report = PositionReport.from_bytes(message.content)
        position = report.groups["everyone"]
        other = self.rng.choice(
            [
                replace(position, length=position.length + 1),
                replace(position, length=max(0, position.length - 1)),
                replace(position, length=position.length + 1, head=self.rng.randbytes(32)),
                replace(position, head=self.rng.randbytes(32)),
                replace(position, pending_reveal=self.rng.randbytes(32)),
                replace(position, pending_reveal=None),
                replace(position, commitment=self.rng.randbytes(32)),
                replace(position, states=(StateSummary(0, 1, 12, False, self.rng.randbytes(32)),)),
                GroupPosition(2**60, self.rng.randbytes(32), None, position.commitment),
            ]
        )
        number = report.number if self.rng.random() < 0.8 else report.number + 1
        content = PositionReport(report.view, number, {"everyone": other}).to_bytes()
        signature = self._sign("standing", slot_of(report.view, "", number), content)
        return replace(message, content=content, signature=signature)

    def _alter_ready(self, spec: Any, commitment: bytes, terms: bytes, number: int) -> Ready:
        honest = Terms.from_bytes(terms)
        choices = [
            replace(honest, index=honest.index + 1),
            replace(honest, head=self.rng.randbytes(32)),
            replace(honest, fixed_states=self.rng.randbytes(32)),
            replace(honest, loop_step=honest.loop_step + 1),
            replace(honest, step=(9, 9)),
            replace(honest, epoch=honest.epoch + 1),
            honest,
        ]
        terms = self.rng.choice(choices).to_bytes()
        match self.rng.randrange(4):
            case 0:
                commitment = self.rng.randbytes(32)
            case 1:
                received = [from_bytes(frame, who).message for who, frame in self._received if self._is(frame, Ready)]
                copies = [each.commitment for each in received if isinstance(each, Ready)]
                commitment = self.rng.choice([commitment, *copies])
            case 2:
                spec = replace(spec, fraction_bits=spec.fraction_bits - 1)
        content = ready_content(spec, commitment, terms)
        signature = self._sign("ready", slot_of(self.view, "everyone", number), content)
        return Ready(spec, commitment, terms, signature if self.rng.random() < 0.8 else NO_SIGNATURE)

    def _alter_chunk(self, start: int, group: str, size: int, words: bytes) -> JournalChunk:
        match self.rng.randrange(4):
            case 0:
                return JournalChunk(start, group, size + 100, words)
            case 1 if start == 0 and size == len(words):  # a well-formed journal with another total
                body = bytearray(words[32:])
                body[-1] ^= 1
                return JournalChunk(0, group, size, sha256(body).digest() + bytes(body))
            case 2 if start == 0 and size == len(words):
                return self._alter_journal(group, words)
        altered = bytearray(words)
        altered[self.rng.randrange(len(altered))] ^= 1
        return JournalChunk(start, group, size, bytes(altered))

    def _alter_journal(self, group: str, words: bytes) -> JournalChunk:
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

    # Forged messages.

    def _forge_message(self, honest: Collection[str]) -> Message:
        rng = self.rng
        messages: list[Message] = [
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
            self._forge_evidence(honest),
        ]
        return rng.choice(messages)

    def _forge_evidence(self, honest: Collection[str]) -> SignedEvidence:
        """Make evidence that would prove an honest member dishonest if signatures were not verified."""
        victim = self.rng.choice(sorted(honest))
        slot = self.rng.randbytes(32)
        twice = tuple((victim, self.rng.randbytes(32), self._sign("ready", slot, b"")) for _ in range(2))
        received = [from_bytes(frame, who).message for who, frame in self._received if self._is(frame, SignedEvidence)]
        if received and self.rng.random() < 0.5:
            evidence = self.rng.choice(received)
            if isinstance(evidence, SignedEvidence):
                return replace(evidence, slot=slot)
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
