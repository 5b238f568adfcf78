"""What the members of one sum say of it: that they are ready, which sealed total they hold, the keys of their seals."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING

from cgd.errors import ProtocolError, RemoteProtocolError
from cgd.secagg.agreement import check_digests, check_settings, check_terms
from cgd.secagg.certificates import Certificate, opening_digest
from cgd.secagg.codec import ready_content, spec_bytes
from cgd.secagg.messages import Confirm, Ready

if TYPE_CHECKING:
    from collections.abc import Collection

    from cgd.secagg.messages import PeerId, SumSpec
    from cgd.secagg.statements import StatementSigner


class Attestations:
    """Collects, checks and compares it; what is said is signed by the notary.

    Args:
        me: this member's name.
        members: all members, in order.
        number: of the sum.
        notary: signs and checks statements.

    Attributes:
        readies: who is ready, and how.
        confirms: who has confirmed which sealed total.
        keys: the keys of the seals that were shown.
    """

    def __init__(self, me: PeerId, members: Collection[PeerId], number: int, statement_signer: StatementSigner) -> None:
        self.readies: dict[PeerId, Ready] = {}
        self.confirms: dict[PeerId, Confirm] = {}
        self.keys: dict[PeerId, bytes] = {}
        self._me, self._members, self._number, self._statement_signer = me, tuple(members), number, statement_signer
        self._sealed = b""

    def missing(self, heard: Collection[PeerId]) -> frozenset[PeerId]:
        """The peers that have not been heard."""
        return frozenset(self._members) - frozenset(heard) - {self._me}

    def get_ready(self, spec: SumSpec, key: bytes, terms: bytes) -> Ready:
        """Say that we are ready, committed to the key of our seal."""
        commitment = sha256(key).digest()
        signature = self._statement_signer.sign("ready", self._number, ready_content(spec, commitment, terms))
        self.readies[self._me] = Ready(spec, commitment, terms, signature)
        return self.readies[self._me]

    def confirm(self, sealed: bytes) -> Confirm:
        """Say which sealed total we hold, given its digest."""
        own, self._sealed = self.readies[self._me], sealed
        seals = [self.readies[name].seal for name in self._members]
        digest = opening_digest(sealed, own.spec, own.terms, seals)
        self.confirms[self._me] = Confirm(digest, self._statement_signer.sign("confirm", self._number, digest))
        return self.confirms[self._me]

    def take_ready(self, sender: PeerId, ready: Ready) -> None:
        """Take in that a peer is ready; see `StatementSigner.take` for what is refused."""
        content = ready_content(ready.spec, ready.seal, ready.terms)
        self._statement_signer.take(sender, "ready", self._number, content, ready.signature)
        self.readies[sender] = ready

    def take_confirm(self, sender: PeerId, confirm: Confirm) -> None:
        """Take in which sealed total a peer holds; see `StatementSigner.take` for what is refused."""
        self._statement_signer.take(sender, "confirm", self._number, confirm.digest, confirm.signature)
        self.confirms[sender] = confirm

    def take_key(self, sender: PeerId, key: bytes) -> None:
        """Take in the key of a peer's seal.

        Raises:
            RemoteProtocolError: it is not the one that the peer was committed to.
        """
        if sha256(key).digest() != self.readies[sender].seal:
            raise RemoteProtocolError(sender, "showed another key than the one its seal was made with")
        self.keys[sender] = key

    def dispute(self) -> None:
        """Tell all members how everybody was ready: somebody was told something else than another."""
        self._statement_signer.dispute("ready", self._number)

    def check_readies(self) -> None:
        """Compare how everybody is ready.

        Raises:
            SettingsError: somebody is under other settings, or at another place of the history.
        """
        try:
            check_settings(self._me, {name: self.readies[name].spec for name in self._members})
            check_terms(self._me, {name: self.readies[name].terms for name in self._members})
        except ProtocolError:
            self.dispute()
            raise

    def check_confirms(self) -> None:
        """Compare which sealed totals everybody holds.

        Raises:
            DisagreementError: they are not the same.
        """
        try:
            check_digests(self._me, self._number, {name: self.confirms[name].digest for name in self._members})
        except ProtocolError:
            self.dispute()
            self._statement_signer.dispute("confirm", self._number)
            raise

    def certificate(self, view: bytes) -> Certificate:
        """Make the proof that the sum is finished; `view` is that in which it was."""
        own = self.readies[self._me]
        signatures = {name: self.confirms[name].signature for name in self._members}
        spec = spec_bytes(own.spec)
        return Certificate(view, self._number, spec, own.terms, self._sealed, self.keys, signatures)
