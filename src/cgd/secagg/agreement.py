"""Agreement on one sum: readiness, masked totals and revealed keys of all members, checked and compared.

Every member receives the statements of all members, so all members name the same deviating member. Deviating from the
majority is a fact and not an accusation: the majority may be wrong.
"""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Any

from cgd.errors import DisagreementError, ProtocolError, RemoteProtocolError, SettingsError
from cgd.secagg.certificates import Certificate, Terms, attempt_digest
from cgd.secagg.codec import ready_content, spec_bytes
from cgd.secagg.messages import Confirm, Ready

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from cgd.secagg.messages import PeerId, SumSpec
    from cgd.secagg.statements import StatementSigner


class SumAgreement:
    """The statements of all members about one sum.

    Args:
        me: the name of this member.
        members: the names of all members, in order.
        number: the number of the sum.
        statement_signer: signs own statements and verifies those of others.

    Attributes:
        readies: the `Ready` messages, by member.
        confirms: the `Confirm` messages, by member.
        revealed_keys: the revealed self-mask keys, by member.
        masked_digest: the digest of the masked total, once we confirm it.
    """

    def __init__(self, me: PeerId, members: Collection[PeerId], number: int, statement_signer: StatementSigner) -> None:
        self.readies: dict[PeerId, Ready] = {}
        self.confirms: dict[PeerId, Confirm] = {}
        self.revealed_keys: dict[PeerId, bytes] = {}
        self._me, self._members, self._number, self._statement_signer = me, tuple(members), number, statement_signer
        self.masked_digest = b""

    def missing(self, received: Collection[PeerId]) -> frozenset[PeerId]:
        """Return the peers that are not in `received`."""
        return frozenset(self._members) - frozenset(received) - {self._me}

    def make_ready(self, spec: SumSpec, key: bytes, terms: bytes) -> Ready:
        """Make our `Ready`, with the commitment to our self-mask key."""
        commitment = sha256(key).digest()
        signature = self._statement_signer.sign("ready", self._number, ready_content(spec, commitment, terms))
        self.readies[self._me] = Ready(spec, commitment, terms, signature)
        return self.readies[self._me]

    def make_confirm(self, masked_digest: bytes) -> Confirm:
        """Make our `Confirm`, given the digest of the masked total."""
        own, self.masked_digest = self.readies[self._me], masked_digest
        commitments = {name: self.readies[name].commitment for name in self._members}
        digest = attempt_digest(masked_digest, own.spec, own.terms, commitments)
        self.confirms[self._me] = Confirm(digest, self._statement_signer.sign("confirm", self._number, digest))
        return self.confirms[self._me]

    def receive_ready(self, sender: PeerId, ready: Ready) -> None:
        """Record a peer's `Ready`; raise as `StatementSigner.receive` does."""
        content = ready_content(ready.spec, ready.commitment, ready.terms)
        self._statement_signer.receive(sender, "ready", self._number, content, ready.signature)
        self.readies[sender] = ready

    def receive_confirm(self, sender: PeerId, confirm: Confirm) -> None:
        """Record a peer's `Confirm`; raise as `StatementSigner.receive` does."""
        self._statement_signer.receive(sender, "confirm", self._number, confirm.digest, confirm.signature)
        self.confirms[sender] = confirm

    def receive_key(self, sender: PeerId, key: bytes) -> None:
        """Record a peer's self-mask key.

        Raises:
            RemoteProtocolError: the key does not match the peer's commitment.
        """
        if sha256(key).digest() != self.readies[sender].commitment:
            raise RemoteProtocolError(sender, "revealed a self-mask key that does not match its commitment")
        self.revealed_keys[sender] = key

    def send_evidence(self) -> None:
        """Send all members the signed `Ready` statements of this sum, because members received different ones."""
        self._statement_signer.send_evidence("ready", self._number)

    def check_readies(self) -> None:
        """Compare the settings and terms of all members.

        Raises:
            SettingsError: a member has other settings, or another position in the history.
        """
        try:
            check_settings(self._me, {name: self.readies[name].spec for name in self._members})
            check_terms(self._me, {name: self.readies[name].terms for name in self._members})
        except ProtocolError:
            self.send_evidence()
            raise

    def check_confirms(self) -> None:
        """Compare the masked totals of all members.

        Raises:
            DisagreementError: they are not the same.
        """
        try:
            check_digests(self._me, self._number, {name: self.confirms[name].digest for name in self._members})
        except ProtocolError:
            self.send_evidence()
            self._statement_signer.send_evidence("confirm", self._number)
            raise

    def certificate(self, view: bytes) -> Certificate:
        """Return the proof that the sum was finished in this view."""
        own = self.readies[self._me]
        signatures = {name: self.confirms[name].signature for name in self._members}
        spec = spec_bytes(own.spec)
        return Certificate(view, self._number, spec, own.terms, self.masked_digest, self.revealed_keys, signatures)


def check_settings(me: PeerId, specs: Mapping[PeerId, SumSpec]) -> None:
    """Check that all members have the same settings; nothing can be read before.

    Raises:
        SettingsError: the settings differ; the error names the first member that deviates from the majority.
    """
    if deviating := _deviating(specs):
        whose = "this member's" if deviating[0] == me else "its"
        more = f" (so do those of {', '.join(deviating[1:])})" if deviating[1:] else ""
        expected = next(spec for member, spec in specs.items() if member not in deviating)
        raise SettingsError(
            deviating[0],
            f"{whose} settings differ from those of most members: "
            f"{'; '.join(expected.differences(specs[deviating[0]]))}{more}; "
            "every member needs the same model with the same public start, and the same training settings, bound, "
            "ring_bits, masking and opening",
        )


def check_terms(me: PeerId, terms: Mapping[PeerId, bytes]) -> None:
    """Check that all members are at the same position of the same history; nothing can be read before.

    Raises:
        SettingsError: the terms differ; the error names the first member that deviates from the majority.
    """
    if deviating := _deviating(terms):
        whose = "this member's" if deviating[0] == me else "its"
        expected = next(encoded for member, encoded in terms.items() if member not in deviating)
        differences = _differences(expected, terms[deviating[0]])
        raise SettingsError(
            deviating[0],
            f"{whose} history differs from that of most members: {'; '.join(differences)}; "
            "restart it, and if the error persists, restart it with an empty state folder",
        )


def _differences(expected: bytes, deviating: bytes) -> list[str]:
    try:
        return Terms.from_bytes(expected).differences(Terms.from_bytes(deviating))
    except (ValueError, TypeError):
        return ["its terms cannot be read"]


def check_digests(me: PeerId, number: int, digests: Mapping[PeerId, bytes]) -> None:
    """Check that all members hold the same masked total; no key is revealed before.

    A member with another total need not have caused the difference, so no member is named as dishonest.

    Raises:
        DisagreementError: the totals differ.
    """
    others = sorted(member for member, digest in digests.items() if digest != digests[me])
    if others:
        raise DisagreementError(
            f"the masked total of sum {number} differs between this member and {', '.join(others)}: a member added "
            "wrongly or sent different values to different members; no total was revealed"
        )


def _deviating(values: Mapping[PeerId, Any]) -> list[PeerId]:
    """Return the members whose value is not the most frequent one; in a tie, the first one counts as such."""
    all_values = list(values.values())
    expected = max(all_values, key=all_values.count)
    return [member for member, value in values.items() if value != expected]
