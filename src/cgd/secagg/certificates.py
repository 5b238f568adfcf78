"""The common history of a group: how a finished sum is proved, and what a member writes down of one that is not.

A finished sum is an entry of the ledger, and every entry is linked to the one before by a hash chain. Two things keep
members from being told a history that did not happen, and from opening a sum twice:

- A **certificate** proves an entry to anybody. Before a sum is opened, all members sign the digest of its sealed total
  and of what they were ready with, the head of the chain among it (`Confirm`). Once it is open, all keys of the seals
  are known. So: the total, sealed again under these keys, must have the digest that all members have signed. Who lacks
  one honest member's signature, or its key, cannot make one up.
- A **mark** is what a member writes down before its key leaves it: from then on somebody may be able to open this sum.
  Until the sum is finished the member takes part in it again with the same members only: with others, the difference
  of two totals would be somebody's addend.

Several attempts at one sum may have been signed by all, because a member kept its key back and said that nobody had
finished it. The latest in which an honest member has shown its key is in its mark. So which of them counts can be read
off the marks that all report (`acceptable`): an attempt that honest members have left behind by showing their keys in a
later one finishes nothing any more, and one in which an honest member has not shown its key has no certificate.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np

from cgd.secagg.codec import read_spec, spec_bytes
from cgd.secagg.fixed_point import WORD_TYPES
from cgd.secagg.masking import seal
from cgd.secagg.statements import slot_of, statement

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    import numpy.typing as npt

    from cgd.secagg.identity import PublicKeys
    from cgd.secagg.messages import Buffer, PeerId, SumSpec
    from cgd.secagg.positions import GroupRow

GENESIS = sha256(b"cgd history").digest()
"""The head of an empty history."""


@dataclass(frozen=True)
class Terms:
    """Where a member is in the common history when it is ready for a sum; all members must be at the same place.

    Attributes:
        epoch: of the federation file.
        place: the number of sums before this one.
        head: of the hash chain over them.
        clock: the step of the program's loop.
        step: the optimiser's slot and step that the sum belongs to, if any.
        kept: the digest of the earlier models that are kept by the members.
    """

    epoch: int
    place: int
    head: bytes
    clock: int
    step: tuple[int, int] | None
    kept: bytes

    def to_bytes(self) -> bytes:
        """Encode the terms, always in the same way."""
        return json.dumps([self.epoch, self.place, self.head.hex(), self.kept.hex(), self.clock, self.step]).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Terms:
        """Read what `to_bytes` made; a ValueError or TypeError if it is malformed."""
        try:
            epoch, place, head, kept, clock, step = json.loads(data)
        except RecursionError:
            raise ValueError("the terms are nested too deeply") from None
        if step is not None:
            slot, number = step
            step = (slot, number)
        if not all(type(each) is int for each in (epoch, place, clock, *(step or ()))):
            raise ValueError("the terms are malformed")
        return cls(epoch, place, bytes.fromhex(head), clock, step, bytes.fromhex(kept))

    def differences(self, other: Terms) -> list[str]:
        """State in words what `other` has differently."""
        words = {
            "epoch": f"epoch {other.epoch} instead of {self.epoch}",
            "place": f"{other.place} sums finished instead of {self.place}",
            "head": "another history",
            "clock": f"step {other.clock} of its loop instead of {self.clock}",
            "step": f"step {other.step} of an optimiser instead of {self.step}",
            "kept": "another best model so far",
        }
        return [text for name, text in words.items() if getattr(self, name) != getattr(other, name)]


def opening_digest(sealed: bytes, spec: SumSpec | bytes, terms: bytes, seals: Sequence[bytes]) -> bytes:
    """Digest what is about to be opened.

    Args:
        sealed: the digest of the sealed total.
        spec: what all were ready with; encoded or not.
        terms: likewise.
        seals: the digests of everybody's key, in the order of names.
    """
    encoded = spec if isinstance(spec, bytes) else spec_bytes(spec)
    parts = (sha256(encoded).digest(), sha256(terms).digest(), sealed, *seals)
    return sha256(b"cgd opening" + b"".join(parts)).digest()


def link(head: bytes, fields: Sequence[Any]) -> bytes:
    """Append an entry, given by its fields, to the hash chain."""
    return sha256(head + json.dumps(fields).encode()).digest()


@dataclass(frozen=True)
class Certificate:
    """The proof that a sum was finished.

    Attributes:
        view: in which it was.
        number: of the sum in the view.
        spec: its settings, encoded.
        terms: what all members were ready with.
        sealed: the digest of the sealed total.
        keys: of the seals, by member.
        signatures: of the members, over the digest of all of it.
    """

    view: bytes
    number: int
    spec: bytes
    terms: bytes
    sealed: bytes
    keys: Mapping[PeerId, bytes]
    signatures: Mapping[PeerId, bytes]

    @property
    def opening(self) -> bytes:
        """The digest that the members have signed: it tells this attempt from any other."""
        seals = [sha256(key).digest() for _, key in sorted(self.keys.items())]
        return opening_digest(self.sealed, self.spec, self.terms, seals)

    def signers(self, group: str, keys: Mapping[PeerId, PublicKeys]) -> frozenset[PeerId]:
        """List the members, of those whose keys are known, that have signed this.

        Raises:
            ValueError: a signature of one of them is missing or wrong.
        """
        if self.keys.keys() != self.signatures.keys():
            raise ValueError("it lacks keys or signatures")
        signed = statement("confirm", slot_of(self.view, group, self.number), sha256(self.opening).digest())
        known = [name for name in self.signatures if name in keys]
        for name in known:
            if not keys[name].verify(signed, self.signatures[name]):
                raise ValueError(f"the signature of {name} is wrong")
        return frozenset(known)

    def check_entry(self, head: bytes | None, fields: Sequence[Any]) -> None:
        """Check that this is about the entry with these fields, behind this head if it is given.

        Raises:
            ValueError: it is about another one.
        """
        kind, epoch, clock, step, size, addends, opening = fields
        terms, described = Terms.from_bytes(self.terms), read_spec(self.spec)
        there = [terms.epoch, terms.clock, terms.step and list(terms.step), self.opening.hex(), len(self.keys)]
        if there != [epoch, clock, step, opening, addends] or head not in (None, terms.head):
            raise ValueError("a sum is not the one that was signed")
        if described.size * WORD_TYPES[described.ring_bits].itemsize != size or kind_of(described) != kind:
            raise ValueError("a sum has another size than was signed")

    def check_total(self, words: Buffer) -> None:
        """Check that these are the words of the total.

        Raises:
            ValueError: they are not what the members have signed.
        """
        described = read_spec(self.spec)
        sealed: npt.NDArray[Any] = np.frombuffer(bytes(words), dtype=WORD_TYPES[described.ring_bits]).copy()
        for key in self.keys.values():
            seal(sealed, key)
        if sha256(sealed.data).digest() != self.sealed:
            raise ValueError("a total is not the one that was signed")

    def to_json(self) -> list[Any]:
        """Encode it."""
        texts = (self.view.hex(), self.number, self.spec.hex(), self.terms.decode(), self.sealed.hex())
        return [*texts, {name: [self.keys[name].hex(), self.signatures[name].hex()] for name in sorted(self.keys)}]

    @classmethod
    def from_json(cls, value: Any) -> Certificate:
        """Read what `to_json` made; a ValueError or TypeError if it is malformed."""
        view, number, spec, terms, sealed, members = value
        keys = {str(name): bytes.fromhex(key) for name, (key, _) in members.items()}
        signatures = {str(name): bytes.fromhex(signature) for name, (_, signature) in members.items()}
        if type(number) is not int or not 0 <= number < 2**63 or any(len(key) != 16 for key in keys.values()):
            raise ValueError("a certificate is malformed")
        hexes = bytes.fromhex(view), number, bytes.fromhex(spec), terms.encode(), bytes.fromhex(sealed)
        return cls(*hexes, keys, signatures)


@dataclass(frozen=True)
class PendingReveal:
    """What a member writes down before the key of its seal leaves it.

    Attributes:
        place: of the sum in the history.
        members: of the sum.
        opening: the digest that all members have signed; of the latest attempt, if there were several.
    """

    place: int
    members: tuple[PeerId, ...]
    opening: bytes

    def to_json(self) -> list[Any]:
        """Encode it."""
        return [self.place, self.members, self.opening.hex()]

    @classmethod
    def from_json(cls, value: Any) -> PendingReveal:
        """Read what `to_json` made; a ValueError or TypeError if it is malformed."""
        place, members, opening = value
        if type(place) is not int or not all(isinstance(name, str) for name in members):
            raise ValueError("a mark is malformed")
        return cls(place, tuple(members), bytes.fromhex(opening))


def acceptable(
    place: int,
    opening: bytes,
    head: bytes,
    own: GroupRow,
    rows: Mapping[PeerId, GroupRow],
    signers: Collection[PeerId],
) -> dict[PeerId, str]:
    """Find whose report does not allow us to take over that this opening finished the sum at this place, and why.

    Everybody who has a past must have signed the opening or hold the same history. Nobody may have shown its key in
    another attempt. And who has not shown its own key in this attempt waits for those who have: as long as they have
    not finished the sum, they may run it again.

    Args:
        place: of the sum.
        opening: the digest of the attempt.
        head: of the history with this sum.
        own: what we report ourselves.
        rows: what every other member reports of the group.
        signers: who has signed the opening.
    """
    against = {}
    took_part = own.length == place and own.mark == opening
    for name, row in rows.items():
        if row.length > place:
            if row.length == place + 1 and row.head != head:
                against[name] = "has another history"
        elif row.length == place and row.mark not in (None, opening):
            against[name] = "took part in another attempt"
        elif row.length == place and row.mark is not None and not took_part:
            against[name] = "has not finished it yet"
        elif row.length and name not in signers:
            against[name] = "is behind and has not signed it"
    return against


def kind_of(spec: SumSpec) -> str:
    """State in words what a sum is of: what a program that runs again must ask for again."""
    weighted = "weighted " if spec.weighted else ""
    return f"{weighted}{spec.dtype}{list(spec.shape)} in {spec.ring_bits} bits"
