"""Signed statements: whoever says different things to different members is found out, and can be proved dishonest.

A statement has a kind, a slot (what it is about: a view, a group, the number of a sum) and a content. An honest member
signs one content for a slot, and tells it to everybody. Members compare digests of what they were told. If these differ
they tell each other what everybody has signed (`SignedEvidence`): two contents for one slot, both with a valid signature, convict
the signer, at every member alike.
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

    from cgd.secagg.identity import Identity, PublicKeys
    from cgd.secagg.messages import PeerId

    Kind = Literal["hello", "standing", "ready", "confirm"]
    Slots = OrderedDict[tuple[str, bytes], dict[PeerId, "SignedStatement"]]

# Slots that are remembered: of what we were told, and of what each member says that it was told. The latest sums of all
# groups are among them; older ones are over.
MAX_SLOTS = 256
MAX_REPORTED_SLOTS = 8
COMPARED = ("standing", "ready", "confirm")
"""What members compare; a greeting is signed as well, but a process may greet again in a new epoch."""
CHECKED_LATER = ("ready",)
"""Statements whose signatures are checked only when there is a dispute about them; that halves the cost of signatures.
What everybody was ready with is digested in everybody's `Confirm`, whose signature is checked at once. So it is known
before anything is opened whether all were told the same, signed or not.
"""


@dataclass(frozen=True)
class SignedStatement:
    """What a member has said for a slot: the digest of the content, and the signature."""

    content: bytes
    signature: bytes


def slot_of(view: bytes, group: str = "", number: int = 0) -> bytes:
    """Name what a statement is about: the digest of a view, a group and a number."""
    return sha256(b"".join((view, number.to_bytes(8, "big"), group.encode()))).digest()


def statement(kind: str, slot: bytes, content: bytes) -> bytes:
    """Encode what is signed; `slot` and `content` are digests."""
    return b"\0".join((b"cgd statement", kind.encode(), slot + content))


class StatementLog:
    """What the members of one view have signed, as this member was told it.

    Args:
        me: this member's name.
        identity: its keys.
        keys: the public keys of all members.
        view: the name of the view.
        tell: sends a message to all other members.
    """

    def __init__(
        self,
        me: PeerId,
        identity: Identity,
        keys: Mapping[PeerId, PublicKeys],
        view: bytes,
        tell: Callable[[SignedEvidence], None],
    ) -> None:
        self.me, self.view = me, view
        self._identity, self._keys, self._tell = identity, keys, tell
        self._said: Slots = OrderedDict()
        self._reported: dict[PeerId, Slots] = {}
        self._disputed: OrderedDict[tuple[str, bytes], None] = OrderedDict()

    def sign(self, kind: Kind, slot: bytes, content: bytes) -> bytes:
        """Sign what we are about to tell everybody."""
        digest = sha256(content).digest()
        signature = self._identity.sign(statement(kind, slot, digest))
        _entry(self._said, kind, slot, MAX_SLOTS)[self.me] = SignedStatement(digest, signature)
        return signature

    def take(self, sender: PeerId, kind: Kind, slot: bytes, content: bytes, signature: bytes) -> None:
        """Take in what a member tells us.

        Raises:
            RemoteProtocolError: it is not signed by the key that the federation file lists.
            EquivocationError: the member has signed something else for this slot.
        """
        said = SignedStatement(sha256(content).digest(), signature)
        if kind not in CHECKED_LATER:
            self._check(sender, kind, slot, said)
        first = _entry(self._said, kind, slot, MAX_SLOTS).setdefault(sender, said)
        for other in (said, *self._reports_of(sender, kind, slot)):
            if other.content != first.content:
                self._check(sender, kind, slot, first)
                self._check(sender, kind, slot, said)
            _compare(sender, kind, slot, first, other)

    def dispute(self, kind: str, slot: bytes) -> None:
        """Tell all members what everybody has signed for this slot, once: something does not fit.

        Raises:
            RemoteProtocolError: a member has told us something that it has not signed.
        """
        if (kind, slot) in self._disputed or (kind, slot) not in self._said:
            return
        self._disputed[kind, slot] = None
        if len(self._disputed) > MAX_SLOTS:
            self._disputed.popitem(last=False)
        said = sorted(self._said[kind, slot].items())
        signed = [(name, each) for name, each in said if self._has_signed(name, kind, slot, each)]
        self._tell(SignedEvidence(kind, slot, tuple((name, each.content, each.signature) for name, each in signed)))
        for name, each in said:
            self._check(name, kind, slot, each)

    def compare(self, sender: PeerId, seen: SignedEvidence) -> None:
        """Compare what another member was told with what we were told, and tell what that was, if it differs.

        Raises:
            RemoteProtocolError: there is nothing to compare.
            EquivocationError: a member has signed different things.
        """
        if seen.kind not in COMPARED:
            raise RemoteProtocolError(sender, f"sent statements of the kind {seen.kind!r}, which nobody compares")
        if len(seen.said) > 2 * len(self._keys):
            raise RemoteProtocolError(sender, f"sent {len(seen.said)} statements about one slot")
        ours = self._said.get((seen.kind, seen.slot), {})
        slots = self._reported.setdefault(sender, OrderedDict())
        reported = _entry(slots, seen.kind, seen.slot, MAX_REPORTED_SLOTS)
        for name, content, signature in seen.said:
            said = SignedStatement(content, signature)
            if self._has_signed(name, seen.kind, seen.slot, said):
                others = self._reports_of(name, seen.kind, seen.slot)
                if name in ours and self._has_signed(name, seen.kind, seen.slot, ours[name]):
                    others.append(ours[name])
                for other in others:
                    _compare(name, seen.kind, seen.slot, other, said)
                reported[name] = said

    def _check(self, name: PeerId, kind: str, slot: bytes, said: SignedStatement) -> None:
        if not self._has_signed(name, kind, slot, said):
            raise RemoteProtocolError(name, f"sent a {kind} statement without a valid signature of its own")

    def _has_signed(self, name: PeerId, kind: str, slot: bytes, said: SignedStatement) -> bool:
        return name in self._keys and self._keys[name].verify(statement(kind, slot, said.content), said.signature)

    def _reports_of(self, name: PeerId, kind: str, slot: bytes) -> list[SignedStatement]:
        """What members were told by this one, as they say."""
        said = [slots.get((kind, slot), {}).get(name) for slots in self._reported.values()]
        return [each for each in said if each is not None]


def _compare(name: PeerId, kind: str, slot: bytes, one: SignedStatement, other: SignedStatement) -> None:
    if one.content != other.content:
        proof = SignedEvidence(kind, slot, tuple((name, each.content, each.signature) for each in (one, other)))
        raise EquivocationError(name, f"has signed two different {kind} statements for different members", proof)


def _entry(slots: Slots, kind: str, slot: bytes, limit: int) -> dict[PeerId, SignedStatement]:
    entry = slots.setdefault((kind, slot), {})
    if len(slots) > limit:
        slots.popitem(last=False)
    return entry


class StatementSigner:
    """Signs and checks the statements of one group's sums; `None` for a dossier leaves everything unsigned.

    Args:
        dossier: that of the view.
        group: the name of the group.
    """

    def __init__(self, statement_log: StatementLog | None = None, group: str = "") -> None:
        self._statement_log, self._group = statement_log, group

    def slot(self, number: int) -> bytes:
        """Name a sum of this group in this view."""
        return slot_of(self._statement_log.view if self._statement_log is not None else b"", self._group, number)

    def sign(self, kind: Kind, number: int, content: bytes) -> bytes:
        """Sign what we say of a sum."""
        return (
            NO_SIGNATURE if self._statement_log is None else self._statement_log.sign(kind, self.slot(number), content)
        )

    def take(self, sender: PeerId, kind: Kind, number: int, content: bytes, signature: bytes) -> None:
        """Check what a member says of a sum; see `StatementLog.take`."""
        if self._statement_log is not None:
            self._statement_log.take(sender, kind, self.slot(number), content, signature)

    def dispute(self, kind: Kind, number: int) -> None:
        """Tell all what everybody said of a sum."""
        if self._statement_log is not None:
            self._statement_log.dispute(kind, self.slot(number))
