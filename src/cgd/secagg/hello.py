"""How processes greet each other: with an ephemeral key, the charter they hold, and a signature over both."""

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

    from cgd.secagg.federation_spec import FederationSpec
    from cgd.secagg.identity import Identity
    from cgd.secagg.messages import PeerId

MAX_INCARNATIONS = 10_000


class HelloExchange:
    """Who has greeted us, and how we greet.

    Args:
        me: this member's name.
        identity: its keys.

    Attributes:
        ephemeral: the key of this life of ours.
        heard: the latest greeting of each peer.
        doubts: peers that have greeted others with other keys than us, and what that means.
    """

    def __init__(self, me: PeerId, identity: Identity) -> None:
        self.ephemeral = EphemeralKey()
        self.heard: dict[PeerId, Hello] = {}
        self.doubts: dict[PeerId, str] = {}
        self._me, self._identity = me, identity
        self._spent: set[tuple[PeerId, bytes]] = set()  # ephemeral keys of peers' earlier lives

    def adopt(self, federation_spec: FederationSpec) -> None:
        """Hold to this charter from now on."""
        self._federation_spec = federation_spec
        self.heard = {peer: hello for peer, hello in self.heard.items() if peer in federation_spec.members}

    def greeting(self, peer: PeerId) -> Hello:
        """What we say to a peer."""
        federation_spec, known = self._federation_spec, self.heard.get(peer)
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
        return replace(hello, signature=self._identity.sign(_signed(hello)))

    def take(self, sender: PeerId, hello: Hello) -> None:
        """Take in a peer's greeting.

        Raises:
            RemoteProtocolError: its key is none or was used before, or it is not signed.
        """
        try:  # a key without a shared secret, such as zeros, would stop us later
            self.ephemeral.check(hello.ephemeral)
        except ValueError:
            raise RemoteProtocolError(sender, "sent an ephemeral key that is none") from None
        if not self._is_signed(sender, hello):
            raise RemoteProtocolError(sender, "sent a greeting that is not signed by the key in the federation file")
        if (sender, hello.ephemeral) in self._spent:  # its shares may be too
            raise RemoteProtocolError(sender, "goes back to an ephemeral key of before; it must be started again")
        known = self.heard.get(sender)
        if known is not None and known.ephemeral != hello.ephemeral:
            if sum(peer == sender for peer, _ in self._spent) >= MAX_INCARNATIONS:  # none of them may be forgotten
                raise RemoteProtocolError(
                    sender, f"was started more than {MAX_INCARNATIONS} times; start us again, too"
                )
            self._spent.add((sender, known.ephemeral))
        self.heard[sender] = hello

    def problem(self, peer: PeerId) -> str | None:
        """Why a peer cannot be in a view with us, if it cannot."""
        if peer not in self.heard:
            return "it is not here"
        return self._federation_spec.difference(self.heard[peer])

    def keys(self, others: Collection[PeerId]) -> dict[PeerId, bytes]:
        """Everybody's ephemeral key."""
        return {self._me: self.ephemeral.public} | {peer: self.heard[peer].ephemeral for peer in others}

    def passed_on(self) -> tuple[tuple[PeerId, bytes, bytes], ...]:
        """The keys that we have, with their signatures, for others to compare."""
        return tuple((peer, hello.ephemeral, hello.signature) for peer, hello in sorted(self.heard.items()))

    def compare(self, sender: PeerId, passed_on: Iterable[tuple[PeerId, bytes, bytes]]) -> None:
        """Compare the keys that a peer has with ours."""
        for peer, ephemeral, signature in passed_on:
            hello = self.heard.get(peer)
            if hello is None or peer == sender or hello.ephemeral == ephemeral or (peer, ephemeral) in self._spent:
                continue
            if self._is_signed(peer, replace(hello, ephemeral=ephemeral, signature=signature)):
                self.doubts[peer] = (
                    f"it has greeted {sender} with another key than us: it was started again just now, or is dishonest"
                )

    def _is_signed(self, peer: PeerId, hello: Hello) -> bool:
        return self._federation_spec.keys[peer].verify(_signed(hello), hello.signature)


def _signed(hello: Hello) -> bytes:
    """What the signature of a greeting is over."""
    return statement("hello", slot_of(hello.ephemeral, "hello", hello.epoch), sha256(hello_content(hello)).digest())
