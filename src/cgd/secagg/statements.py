"""Signed statements: a member that signs different statements for different members is detected, with proof.

A statement has a kind, a slot (its subject: a view, a group, the number of a sum) and a content. An honest member signs
one content per slot and sends it to all members. Members compare digests of the contents they received. If the digests
differ, they send each other all signed contents (`SignedEvidence`): two contents for one slot, both with a valid
signature, prove to every member that the signer equivocated.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Literal

from cgd.errors import EquivocationError, RemoteProtocolError
from cgd.secagg.messages import NO_SIGNATURE, SignedEvidence

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cgd.secagg.federation_spec import Identity, PublicKeys
    from cgd.secagg.messages import PeerId

    Kind = Literal["hello", "standing", "ready", "confirm"]
    Slots = OrderedDict[tuple[str, bytes], dict[PeerId, "SignedStatement"]]

# Slots kept in memory: of the statements of each kind that we received, and of the evidence of each member. The latest
# sums of all groups are among them, because statements of another kind do not displace them; older sums are finished.
MAX_SLOTS = 256
MAX_REPORTED_SLOTS = 8
# "standing" is the kind of position reports. It is part of the signed bytes, so it keeps its old name.
KINDS = ("hello", "standing", "ready", "confirm")
COMPARABLE_KINDS = KINDS[1:]
"""The kinds that evidence may be about. A hello is signed as well, but a process sends another one in a new epoch."""
VERIFIED_ON_DISPUTE = ("ready",)
"""The kinds whose signatures are verified only in a dispute, which halves the cost of signatures. Every `Confirm`
contains a digest of all `Ready` statements and its signature is verified at once. So a difference between them is
detected before a key is revealed, signed or not.
"""


@dataclass(frozen=True)
class SignedStatement:
    """A member's statement for a slot: the digest of the content, and the signature."""

    content: bytes
    signature: bytes


def slot_of(view: bytes, group: str = "", number: int = 0) -> bytes:
    """Return the slot of a view, a group and a number: their digest."""
    return sha256(b"".join((view, number.to_bytes(8, "big"), group.encode()))).digest()


def statement(kind: str, slot: bytes, content: bytes) -> bytes:
    """Encode the bytes to sign; `slot` and `content` are digests."""
    return b"\0".join((b"cgd statement", kind.encode(), slot + content))


class StatementLog:
    """The statements that the members of one view have signed, as this member received them.

    Args:
        me: the name of this member.
        identity: its keys.
        keys: the public keys of all members.
        view: the digest of the view.
        send: sends evidence to all other members.
    """

    def __init__(
        self,
        me: PeerId,
        identity: Identity,
        keys: Mapping[PeerId, PublicKeys],
        view: bytes,
        send: Callable[[SignedEvidence], None],
    ) -> None:
        self.me, self.view = me, view
        self._identity, self._keys, self._send = identity, keys, send
        self._received: dict[str, Slots] = {kind: OrderedDict() for kind in KINDS}
        self._reported: dict[PeerId, Slots] = {}
        self._disputed: OrderedDict[tuple[str, bytes], None] = OrderedDict()

    def sign(self, kind: Kind, slot: bytes, content: bytes) -> bytes:
        """Sign and record our own statement."""
        digest = sha256(content).digest()
        signature = self._identity.sign(statement(kind, slot, digest))
        _entry(self._received[kind], kind, slot, MAX_SLOTS)[self.me] = SignedStatement(digest, signature)
        return signature

    def receive(self, sender: PeerId, kind: Kind, slot: bytes, content: bytes, signature: bytes) -> None:
        """Verify and record a member's statement.

        Raises:
            RemoteProtocolError: it is not signed by the key in the federation file.
            EquivocationError: the member signed another content for this slot.
        """
        received = SignedStatement(sha256(content).digest(), signature)
        if kind not in VERIFIED_ON_DISPUTE:
            self._verify(sender, kind, slot, received)
        first = _entry(self._received[kind], kind, slot, MAX_SLOTS).setdefault(sender, received)
        for other in (received, *self._reports_of(sender, kind, slot)):
            if other.content != first.content:
                self._verify(sender, kind, slot, first)
                self._verify(sender, kind, slot, received)
            _compare(sender, kind, slot, first, other)

    def send_evidence(self, kind: str, slot: bytes) -> None:
        """Send all members the signed statements for this slot, once per slot.

        Raises:
            RemoteProtocolError: a statement that we received is not signed by its sender.
        """
        if (kind, slot) in self._disputed or (kind, slot) not in self._received[kind]:
            return
        self._disputed[kind, slot] = None
        if len(self._disputed) > MAX_SLOTS:
            self._disputed.popitem(last=False)
        received = sorted(self._received[kind][kind, slot].items())
        signed = [(name, each) for name, each in received if self._has_signed(name, kind, slot, each)]
        self._send(SignedEvidence(kind, slot, tuple((name, each.content, each.signature) for name, each in signed)))
        for name, each in received:
            self._verify(name, kind, slot, each)

    def receive_evidence(self, sender: PeerId, evidence: SignedEvidence) -> None:
        """Compare the statements that another member received with those that we received.

        Raises:
            RemoteProtocolError: the evidence is malformed.
            EquivocationError: a member signed different contents for one slot.
        """
        kind, slot = evidence.kind, evidence.slot
        if kind not in COMPARABLE_KINDS:
            raise RemoteProtocolError(sender, f"sent evidence of the kind {kind!r}, which is not compared")
        if len(evidence.statements) > 2 * len(self._keys):
            raise RemoteProtocolError(sender, f"sent {len(evidence.statements)} statements about one slot")
        ours = self._received[kind].get((kind, slot), {})
        reported = _entry(self._reported.setdefault(sender, OrderedDict()), kind, slot, MAX_REPORTED_SLOTS)
        for name, content, signature in evidence.statements:
            signed = SignedStatement(content, signature)
            if self._has_signed(name, kind, slot, signed):
                others = self._reports_of(name, kind, slot)
                if name in ours and self._has_signed(name, kind, slot, ours[name]):
                    others.append(ours[name])
                for other in others:
                    _compare(name, kind, slot, other, signed)
                reported[name] = signed

    def _verify(self, name: PeerId, kind: str, slot: bytes, signed: SignedStatement) -> None:
        if not self._has_signed(name, kind, slot, signed):
            raise RemoteProtocolError(name, f"sent a {kind} statement without a valid signature of its own")

    def _has_signed(self, name: PeerId, kind: str, slot: bytes, signed: SignedStatement) -> bool:
        return name in self._keys and self._keys[name].verify(statement(kind, slot, signed.content), signed.signature)

    def _reports_of(self, name: PeerId, kind: str, slot: bytes) -> list[SignedStatement]:
        """Return this member's statements in the evidence of all members."""
        reports = [slots.get((kind, slot), {}).get(name) for slots in self._reported.values()]
        return [each for each in reports if each is not None]


def _compare(name: PeerId, kind: str, slot: bytes, one: SignedStatement, other: SignedStatement) -> None:
    if one.content != other.content:
        proof = SignedEvidence(kind, slot, tuple((name, each.content, each.signature) for each in (one, other)))
        raise EquivocationError(name, f"signed two different {kind} statements for different members", proof)


def _entry(slots: Slots, kind: str, slot: bytes, limit: int) -> dict[PeerId, SignedStatement]:
    entry = slots.setdefault((kind, slot), {})
    if len(slots) > limit:
        slots.popitem(last=False)
    return entry


class StatementSigner:
    """Signs and verifies the statements of one group's sums; without a log, nothing is signed or verified.

    Args:
        statement_log: the log of the view.
        group: the name of the group.
    """

    def __init__(self, statement_log: StatementLog | None = None, group: str = "") -> None:
        self._statement_log, self._group = statement_log, group

    def slot(self, number: int) -> bytes:
        """Return the slot of a sum of this group in this view."""
        return slot_of(self._statement_log.view if self._statement_log is not None else b"", self._group, number)

    def sign(self, kind: Kind, number: int, content: bytes) -> bytes:
        """Sign our statement about a sum."""
        log = self._statement_log
        return NO_SIGNATURE if log is None else log.sign(kind, self.slot(number), content)

    def receive(self, sender: PeerId, kind: Kind, number: int, content: bytes, signature: bytes) -> None:
        """Verify a member's statement about a sum; see `StatementLog.receive`."""
        if self._statement_log is not None:
            self._statement_log.receive(sender, kind, self.slot(number), content, signature)

    def send_evidence(self, kind: Kind, number: int) -> None:
        """Send all members the signed statements about a sum."""
        if self._statement_log is not None:
            self._statement_log.send_evidence(kind, self.slot(number))
