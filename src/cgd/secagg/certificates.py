"""Certificates: proofs of finished sums, and the record of sums whose key may have been revealed.

A finished sum is an entry of the journal, and a hash chain links every entry to the previous one. Two records prevent a
member from accepting a history that did not happen, and from revealing a sum twice:

- A **certificate** proves an entry to any member. Before a key is revealed, all members sign the digest of the masked
  total and of everything they agreed on, including the head of the chain (`Confirm`). Once the total is revealed, all
  self-mask keys are known. So the total, masked again with these keys, must have the digest that all members signed. A
  certificate cannot be forged without the signature and the key of every honest member.
- A **pending reveal** is what a member writes to its journal before it sends its self-mask key: from then on another
  member may be able to reveal this sum. Until the sum is finished, the member repeats it with the same members only:
  with other members, the difference of the two totals would be a member's addend. For the gradient sum of an optimiser
  step this holds even if another sum, such as a new count of samples, takes its place in the journal: the journal keeps
  the latest step that may have been revealed (`RevealedStep`), and that step is finished once or never. No other member
  can restore a lost pending reveal. With a full disk it cannot be stored: the member logs a warning and sends its key,
  and the rule depends on the pending reveals of the other honest members (P18 of the threat model).

Several attempts at one sum may have been signed by all members, because a member withheld its key and claimed that no
member finished the sum. The latest attempt in which an honest member revealed its key is in its pending reveal. So the
pending reveals that all members report decide which attempt counts (`find_objections`): an attempt is void once honest
members have revealed their keys in a later one, and an attempt in which an honest member has not revealed its key has
no certificate.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np

from cgd.secagg.codec import read_spec, spec_bytes
from cgd.secagg.fixed_point import WORD_TYPES
from cgd.secagg.masking import add_self_mask
from cgd.secagg.statements import slot_of, statement

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    import numpy.typing as npt

    from cgd.secagg.federation_spec import PublicKeys
    from cgd.secagg.messages import Buffer, PeerId, SumSpec
    from cgd.secagg.positions import GroupPosition

    FormerMembers = tuple[int, tuple[PeerId, ...], tuple[str, ...]]

GENESIS = sha256(b"cgd history").digest()
"""The head of an empty history."""
WEIGHTED = "weighted "
"""The description of a weighted sum begins with this; if it belongs to a step, it is the step's gradient sum."""


@dataclass(frozen=True)
class Terms:
    """The position in the history at which a member is ready for a sum; it must be the same for all members.

    Attributes:
        epoch: the epoch of the federation file.
        index: the number of finished sums.
        head: the head of the hash chain over them.
        loop_step: the step of the program's loop.
        step: the optimiser's slot and step that the sum belongs to, if any.
        fixed_states: the digest of the optimiser states that are fixed, such as the best model.
    """

    epoch: int
    index: int
    head: bytes
    loop_step: int
    step: tuple[int, int] | None
    fixed_states: bytes

    def to_bytes(self) -> bytes:
        """Encode the terms; equal terms have equal bytes."""
        digests = self.head.hex(), self.fixed_states.hex()
        return json.dumps([self.epoch, self.index, *digests, self.loop_step, self.step]).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Terms:
        """Decode the result of `to_bytes`; raise a ValueError or TypeError if it is malformed."""
        try:
            epoch, index, head, fixed_states, loop_step, step = json.loads(data)
        except RecursionError:
            raise ValueError("the terms are nested too deeply") from None
        if step is not None:
            slot, number = step
            step = (slot, number)
        if not all(type(each) is int for each in (epoch, index, loop_step, *(step or ()))):
            raise ValueError("the terms are malformed")
        return cls(epoch, index, bytes.fromhex(head), loop_step, step, bytes.fromhex(fixed_states))

    def differences(self, other: Terms) -> list[str]:
        """Describe how `other` differs from these terms."""
        descriptions = {
            "epoch": f"epoch {other.epoch} instead of {self.epoch}",
            "index": f"{other.index} finished sums instead of {self.index}",
            "head": "another history of finished sums",
            "loop_step": f"step {other.loop_step} of its loop instead of {self.loop_step}",
            "step": f"optimiser step {other.step} instead of {self.step}",
            "fixed_states": "another best model so far",
        }
        return [text for name, text in descriptions.items() if getattr(self, name) != getattr(other, name)]


def spec_digest(spec: SumSpec) -> str:
    """Return a digest of a sum's settings, including its context."""
    return sha256(spec_bytes(spec)).hexdigest()


def attempt_digest(
    masked_digest: bytes, spec: SumSpec | bytes, terms: bytes, commitments: Mapping[PeerId, bytes]
) -> bytes:
    """Return the digest that identifies an attempt at a sum; all members sign it before they reveal their keys.

    Args:
        masked_digest: the digest of the masked total.
        spec: the settings of the sum, encoded or not.
        terms: the terms of the sum, encoded.
        commitments: the members' commitments to their self-mask keys. The names are part of the digest: otherwise a
            certificate could be presented with another name in place of a member's.
    """
    encoded = spec if isinstance(spec, bytes) else spec_bytes(spec)
    members = [sha256(name.encode()).digest() + commitment for name, commitment in sorted(commitments.items())]
    parts = (sha256(encoded).digest(), sha256(terms).digest(), masked_digest, *members)
    return sha256(b"cgd opening" + b"".join(parts)).digest()


def extend_chain(head: bytes, fields: Sequence[Any]) -> bytes:
    """Return the head of the hash chain after an entry with these fields."""
    return sha256(head + json.dumps(fields).encode()).digest()


@dataclass(frozen=True)
class Certificate:
    """The proof that a sum was finished.

    Attributes:
        view: the digest of the view in which it was finished.
        number: the number of the sum in the view.
        spec: its settings, encoded.
        terms: its terms, encoded.
        masked_digest: the digest of the masked total.
        keys: the self-mask keys, by member.
        signatures: the signatures of the `Confirm` statements, by member.
    """

    view: bytes
    number: int
    spec: bytes
    terms: bytes
    masked_digest: bytes
    keys: Mapping[PeerId, bytes]
    signatures: Mapping[PeerId, bytes]

    @property
    def attempt(self) -> bytes:
        """The digest that the members signed; it identifies this attempt at the sum."""
        commitments = {name: sha256(key).digest() for name, key in self.keys.items()}
        return attempt_digest(self.masked_digest, self.spec, self.terms, commitments)

    def signers(self, group: str, keys: Mapping[PeerId, PublicKeys], *, all_valid: bool = True) -> frozenset[PeerId]:
        """Verify the signatures of all members whose public keys are known, and return the members that signed.

        Args:
            group: the name of the group.
            keys: the members' public keys.
            all_valid: whether one invalid signature makes the certificate invalid. In a certificate of an earlier epoch
                it may be the signature of a member that has another key now: then that member has not signed.

        Raises:
            ValueError: a signature is missing, or invalid although all must be valid.
        """
        if self.keys.keys() != self.signatures.keys():
            raise ValueError("the certificate lacks keys or signatures")
        signed = statement("confirm", slot_of(self.view, group, self.number), sha256(self.attempt).digest())
        known = [name for name in self.signatures if name in keys]
        valid = frozenset(name for name in known if keys[name].verify(signed, self.signatures[name]))
        if all_valid and (invalid := sorted(set(known) - valid)):
            raise ValueError(f"the signature of {invalid[0]} is invalid")
        return valid

    def verify_entry(self, head: bytes | None, fields: Sequence[Any]) -> None:
        """Check that this certificate is about the entry with these fields, after this head if it is given.

        Raises:
            ValueError: it is about another entry.
        """
        description, epoch, loop_step, step, size, addends, attempt = fields
        terms, spec = Terms.from_bytes(self.terms), read_spec(self.spec)
        certified = [terms.epoch, terms.loop_step, terms.step and list(terms.step), self.attempt.hex(), len(self.keys)]
        if certified != [epoch, loop_step, step, attempt, addends] or head not in (None, terms.head):
            raise ValueError("a sum is not the one that was signed")
        if spec.size * WORD_TYPES[spec.ring_bits].itemsize != size or describe_sum(spec) != description:
            raise ValueError("a sum has another size than was signed")

    def verify_total(self, words: Buffer) -> None:
        """Check that these are the words of the total.

        Raises:
            ValueError: they are not what the members signed.
        """
        dtype = WORD_TYPES[read_spec(self.spec).ring_bits]
        masked: npt.NDArray[Any] = np.frombuffer(bytes(words), dtype=dtype).copy()
        for key in self.keys.values():
            add_self_mask(masked, key)
        if sha256(masked.data).digest() != self.masked_digest:
            raise ValueError("a total is not the one that was signed")

    def to_json(self) -> list[Any]:
        """Encode the certificate as JSON values."""
        texts = (self.view.hex(), self.number, self.spec.hex(), self.terms.decode(), self.masked_digest.hex())
        return [*texts, {name: [self.keys[name].hex(), self.signatures[name].hex()] for name in sorted(self.keys)}]

    @classmethod
    def from_json(cls, value: Any) -> Certificate:
        """Decode the result of `to_json`; raise a ValueError or TypeError if it is malformed."""
        view, number, spec, terms, masked_digest, members = value
        keys = {str(name): bytes.fromhex(key) for name, (key, _) in members.items()}
        signatures = {str(name): bytes.fromhex(signature) for name, (_, signature) in members.items()}
        if type(number) is not int or not 0 <= number < 2**63 or any(len(key) != 16 for key in keys.values()):
            raise ValueError("a certificate is malformed")
        decoded = bytes.fromhex(view), number, bytes.fromhex(spec), terms.encode(), bytes.fromhex(masked_digest)
        return cls(*decoded, keys, signatures)


@dataclass(frozen=True)
class PendingReveal:
    """The record that a member writes before it sends its self-mask key.

    Attributes:
        index: the index of the sum in the journal.
        members: the members of the sum.
        attempt: the digest that all members signed, of the latest attempt.
        step: the optimiser's slot and step, if it is the gradient sum of one.
        keys: the digest of each member's public keys; another key holder under the same name is another member.
        spec: the digest of its settings, if it is the gradient sum of a step.
        interrupted: with a quorum, what we have of the sum (`completion.InterruptedSum`), as JSON values.
    """

    index: int
    members: tuple[PeerId, ...]
    attempt: bytes
    step: tuple[int, int] | None = None
    keys: tuple[str, ...] = ()
    spec: str = ""
    interrupted: Any = None

    def to_json(self) -> list[Any]:
        """Encode the record as JSON values."""
        more = [] if self.interrupted is None else [self.interrupted]
        return [self.index, self.members, self.attempt.hex(), self.step, self.keys, self.spec, *more]

    @classmethod
    def from_json(cls, value: Any) -> PendingReveal:
        """Decode the result of `to_json`; raise a ValueError or TypeError if it is malformed."""
        index, members, attempt, *rest = value
        step, keys, spec, interrupted = rest + [None, [], "", None][len(rest) :]  # earlier versions have fewer
        if step is not None:
            slot, number = step
            step = (slot, number)
        if not all(type(each) is int for each in (index, *(step or ()))):
            raise ValueError("a pending reveal is malformed")
        return cls(index, _names(members), bytes.fromhex(attempt), step, _names(keys), str(spec), interrupted)


@dataclass(frozen=True)
class RevealedStep:
    """The latest step of an optimiser whose gradient sum may have been revealed.

    Attributes:
        number: the number of the step.
        members: the members of the sum; none if they are not known.
        keys: the digest of each member's public keys, if they are known.
        finished: whether the sum is in the journal.
        spec: the digest of its settings, if it is not finished.
        former: the sets of members of earlier steps, in order: the last step of each, its members and their keys.
    """

    number: int
    members: tuple[PeerId, ...]
    keys: tuple[str, ...]
    finished: bool
    spec: str = ""
    former: tuple[FormerMembers, ...] = ()

    def after(self, before: RevealedStep) -> RevealedStep:
        """Return this record with the earlier members, given the record that it replaces."""
        same = self.members == before.members
        keys = self.keys or (before.keys if same else ())
        if self.number == before.number or not before.members or (same and before.keys in ((), keys)):
            return replace(self, keys=keys, former=before.former)
        last = before.number, before.members, before.keys
        earlier = before.former[:-1] if before.former and before.former[-1][1:] == last[1:] else before.former
        return replace(self, keys=keys, former=(*earlier, last))

    def members_of(self, number: int) -> tuple[tuple[PeerId, ...], tuple[str, ...]]:
        """Return the members of a step and their keys; none if they are not known, or if it was not summed."""
        sets = (*self.former, (self.number, self.members, self.keys))
        return next(((members, keys) for last, members, keys in sets if number <= last), ((), ()))

    def to_json(self) -> list[Any]:
        """Encode the record as JSON values."""
        former = [self.former] if self.former else []
        return [self.number, self.members, self.keys, self.finished, self.spec, *former]

    @classmethod
    def from_json(cls, value: Any) -> RevealedStep:
        """Decode the result of `to_json`; raise a ValueError or TypeError if it is malformed."""
        number, members, keys, finished, *rest = value
        spec, rows = rest + ["", []][len(rest) :]  # records of earlier versions have fewer
        former = tuple((last, _names(names), _names(digests)) for last, names, digests in rows)
        if not all(type(each) is int and each >= 0 for each in (number, *(last for last, _, _ in former))):
            raise ValueError("a revealed step is malformed")
        return cls(number, _names(members), _names(keys), bool(finished), str(spec), former)


def _names(value: Any) -> tuple[PeerId, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise ValueError("a list of members is malformed")
    return tuple(value)


def find_objections(
    index: int,
    attempt: bytes,
    head: bytes,
    own: GroupPosition,
    positions: Mapping[PeerId, GroupPosition],
    signers: Collection[PeerId],
) -> dict[PeerId, str]:
    """Return the members whose reports forbid us to accept that this attempt finished the sum, and the reasons.

    Every member with a history must have signed the attempt or hold the same history. No member may have revealed its
    key in another attempt. A member that has not revealed its own key in this attempt waits for those that have: until
    they have finished the sum, they may repeat it.

    Args:
        index: the index of the sum in the journal.
        attempt: the digest of the attempt.
        head: the head of the history that includes this sum.
        own: the position that we report.
        positions: the position that each other member reports.
        signers: the members that signed the attempt.
    """
    objections = {}
    took_part = own.length == index and own.pending_reveal == attempt
    for name, position in positions.items():
        if position.length > index:
            if position.length == index + 1 and position.head != head:
                objections[name] = "has another history"
        elif position.length == index and position.pending_reveal not in (None, attempt):
            objections[name] = "took part in another attempt"
        elif position.length == index and position.pending_reveal is not None and not took_part:
            objections[name] = "has not finished it yet"
        elif position.length and name not in signers:
            objections[name] = "is behind and has not signed it"
    return objections


def find_objections_in_period(
    index: int,
    attempt: bytes,
    head: bytes,
    period: int,
    own: GroupPosition,
    positions: Mapping[PeerId, GroupPosition],
) -> dict[PeerId, str]:
    """Return the same as `find_objections` if there is a quorum: all its members have signed, and are a quorum.

    So they have a member in common with those present, which reports what it revealed. Periods are ordered: pending
    reveals of earlier periods are void, because a quorum has gone on after them.
    """
    objections = {}
    took_part = own.length == index and own.pending_reveal == attempt
    for name, position in positions.items():
        if position.length > index:
            if position.length == index + 1 and position.head != head:
                objections[name] = "has another history"
        elif position.length == index and position.pending_reveal is not None:
            if position.pending_reveal != attempt:
                if position.attendance is None or position.attendance.revealed_in >= period:
                    objections[name] = "took part in a later attempt"
            elif not took_part:
                objections[name] = "has not finished it yet"
    return objections


def describe_sum(spec: SumSpec) -> str:
    """Describe the values of a sum; a program that runs again must request a sum of the same description."""
    weighted = WEIGHTED if spec.weighted else ""
    return f"{weighted}{spec.dtype}{list(spec.shape)} in {spec.ring_bits} bits"
