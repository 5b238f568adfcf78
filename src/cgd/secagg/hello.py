"""The exchange of hellos: each process announces its ephemeral key and federation spec, and signs both."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING

from cgd.errors import RemoteProtocolError
from cgd.secagg.codec import hello_content
from cgd.secagg.key_agreement import EphemeralKey
from cgd.secagg.messages import EPHEMERAL_BYTES, Hello
from cgd.secagg.statements import slot_of, statement

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from cgd.secagg.federation_spec import FederationSpec, Identity
    from cgd.secagg.messages import PeerId

MAX_INCARNATIONS = 10_000


class HelloExchange:
    """The hellos of this member and its peers.

    Args:
        me: the name of this member.
        identity: its keys.

    Attributes:
        ephemeral: the ephemeral key of this incarnation.
        received: the latest hello of each peer.
        suspicions: the peers that sent other members another ephemeral key than us, with the possible reasons, by the
            member that showed us the other key.
    """

    def __init__(self, me: PeerId, identity: Identity) -> None:
        self.ephemeral = EphemeralKey()
        self.received: dict[PeerId, Hello] = {}
        self.suspicions: dict[PeerId, dict[PeerId, str]] = {}
        self._me, self._identity = me, identity
        self._retired: set[tuple[PeerId, bytes]] = set()  # ephemeral keys of peers' earlier incarnations
        self._contradicted: set[PeerId] = set()  # members that caused suspicions and stayed in our view

    def adopt(self, federation_spec: FederationSpec) -> None:
        """Use this federation spec from now on."""
        self._federation_spec = federation_spec
        self.received = {peer: hello for peer, hello in self.received.items() if peer in federation_spec.members}

    def make_hello(self, peer: PeerId) -> Hello:
        """Return our signed hello for a peer."""
        federation_spec, known = self._federation_spec, self.received.get(peer)
        knows = known.ephemeral if known is not None else bytes(EPHEMERAL_BYTES)
        sections = tuple(sorted(federation_spec.sections.items()))
        hello = Hello(
            self.ephemeral.public,
            knows,
            federation_spec.version,
            federation_spec.federation,
            federation_spec.epoch,
            sections,
        )
        return replace(hello, signature=self._identity.sign(_signed_bytes(hello)))

    def receive(self, sender: PeerId, hello: Hello) -> None:
        """Verify and record a peer's hello.

        Raises:
            RemoteProtocolError: its key is invalid or was used before, or its signature is invalid.
        """
        try:  # an invalid key, such as zeros, would make the key agreement fail later
            self.ephemeral.check(hello.ephemeral)
        except ValueError:
            raise RemoteProtocolError(sender, "sent an invalid ephemeral key") from None
        if not self._is_signed(sender, hello):
            raise RemoteProtocolError(sender, "sent a hello that is not signed by its key in the federation file")
        if (sender, hello.ephemeral) in self._retired:  # masks of this key may have been used
            raise RemoteProtocolError(sender, "returned to the ephemeral key of an earlier incarnation; restart it")
        known = self.received.get(sender)
        if known is not None and known.ephemeral != hello.ephemeral:
            if sum(peer == sender for peer, _ in self._retired) >= MAX_INCARNATIONS:  # all of them must be remembered
                raise RemoteProtocolError(
                    sender, f"was restarted more than {MAX_INCARNATIONS} times; restart this member, too"
                )
            self._retired.add((sender, known.ephemeral))
        self.received[sender] = hello

    def problem(self, peer: PeerId) -> str | None:
        """Return why a peer cannot be in a view with us, or None if it can."""
        if peer not in self.received:
            return "its hello has not been received"
        return self._federation_spec.difference(self.received[peer])

    def ephemeral_keys(self, others: Collection[PeerId]) -> dict[PeerId, bytes]:
        """Return the ephemeral keys of this member and these peers."""
        return {self._me: self.ephemeral.public} | {peer: self.received[peer].ephemeral for peer in others}

    def signed_keys(self) -> tuple[tuple[PeerId, bytes, bytes], ...]:
        """Return the received ephemeral keys with their signatures, for other members to compare."""
        return tuple((peer, hello.ephemeral, hello.signature) for peer, hello in sorted(self.received.items()))

    def compare_keys(self, sender: PeerId, signed_keys: Iterable[tuple[PeerId, bytes, bytes]]) -> None:
        """Compare the ephemeral keys that a peer received with those that we received.

        A signed key may be that of an earlier process, which the peer shows to harm the signer; see `withdraw`.
        """
        if sender in self._contradicted:
            return
        one_per_peer = {peer: (ephemeral, signature) for peer, ephemeral, signature in signed_keys}
        for peer, (ephemeral, signature) in one_per_peer.items():
            hello = self.received.get(peer)
            if hello is None or peer == sender or hello.ephemeral == ephemeral or (peer, ephemeral) in self._retired:
                continue
            if self._is_signed(peer, replace(hello, ephemeral=ephemeral, signature=signature)):
                self.suspicions.setdefault(sender, {})[peer] = (
                    f"it sent {sender} another ephemeral key than this member: it was restarted just now, or one of "
                    "the two is dishonest"
                )

    @property
    def suspected(self) -> dict[PeerId, str]:
        """The peers that sent other members another ephemeral key than us, as these show, and the possible reasons."""
        return {peer: reason for suspicions in self.suspicions.values() for peer, reason in suspicions.items()}

    def withdraw(self, sender: PeerId) -> None:
        """Drop the suspicions that a peer caused: it sent a message of our view, so it received the same keys as we.

        An honest member that received another key has left our view, and does not return to it.
        """
        del self.suspicions[sender]
        self._contradicted.add(sender)

    def leave_view(self) -> None:
        """Drop all suspicions: they are about the keys of one view."""
        self.suspicions.clear()
        self._contradicted.clear()

    def _is_signed(self, peer: PeerId, hello: Hello) -> bool:
        return self._federation_spec.keys[peer].verify(_signed_bytes(hello), hello.signature)


def _signed_bytes(hello: Hello) -> bytes:
    """Return the bytes that the signature of a hello covers."""
    return statement("hello", slot_of(hello.ephemeral, "hello", hello.epoch), sha256(hello_content(hello)).digest())
