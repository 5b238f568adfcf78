"""Proofs about the common history of a group: that a sum was finished, and that one was run again by common consent.

A finished sum is an entry of the ledger, and every entry is linked to the one before by a hash chain. Three things keep
members from being told a history that did not happen:

- A **certificate** proves an entry to anybody. Before a sum is opened, all members sign the digest of its sealed total
  and of what they were ready with, the head of the chain among it (`Confirm`). Once it is open, all keys of the seals
  are known. So: the total, sealed again under these keys, must have the digest that all members have signed. Who lacks
  one honest member's signature, or its key, cannot make one up.
- A **mark** is what a member writes down before its key leaves it: from then on somebody may be able to open this sum.
  Until the sum is finished the member takes part in it again with the same members only: with others, the difference
  of two totals would be somebody's addend.
- A **rerun** proves that all members agreed to run a marked sum again, because nobody had finished it: everybody's
  signed report, and everybody's signed readiness that refers to these reports. From then on a certificate of the
  earlier attempt is void, so that no two members can be given different totals of one sum.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np

from cgd.protocol.frames import read_ready, read_spec, spec_bytes
from cgd.protocol.standings import Report, digest_of_reports
from cgd.protocol.statements import slot_of, statement
from cgd.ring.fixed_point import WORD_TYPES
from cgd.ring.sharing import seal

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    import numpy.typing as npt

    from cgd.protocol.identity import PublicKeys
    from cgd.protocol.messages import Buffer, PeerId, SumSpec
    from cgd.protocol.standings import GroupRow

GENESIS = sha256(b"cgd history").digest()
"""The head of an empty history."""
OTHER_REPORTS = "was told other reports"


@dataclass(frozen=True)
class Terms:
    """Where a member is in the common history when it is ready for a sum; all members must be at the same place.

    Attributes:
        epoch: of the federation file.
        place: the number of sums before this one.
        head: of the hash chain over them.
        reports: the digest of what all members reported when the view was formed.
        clock: the step of the program's loop.
        step: the optimiser's slot and step that the sum belongs to, if any.
        kept: the digest of the earlier models that are kept by the members.
    """

    epoch: int
    place: int
    head: bytes
    reports: bytes
    clock: int
    step: tuple[int, int] | None
    kept: bytes

    def to_bytes(self) -> bytes:
        """Encode the terms, always in the same way."""
        hexes = self.head.hex(), self.reports.hex(), self.kept.hex()
        return json.dumps([self.epoch, self.place, *hexes, self.clock, self.step]).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Terms:
        """Read what `to_bytes` made; a ValueError or TypeError if it is malformed."""
        try:
            epoch, place, head, reports, kept, clock, step = json.loads(data)
        except RecursionError:
            raise ValueError("the terms are nested too deeply") from None
        if step is not None:
            slot, number = step
            step = (slot, number)
        if not all(type(each) is int for each in (epoch, place, clock, *(step or ()))):
            raise ValueError("the terms are malformed")
        return cls(epoch, place, bytes.fromhex(head), bytes.fromhex(reports), clock, step, bytes.fromhex(kept))

    def differences(self, other: Terms) -> list[str]:
        """State in words what `other` has differently."""
        words = {
            "epoch": f"epoch {other.epoch} instead of {self.epoch}",
            "place": f"{other.place} sums finished instead of {self.place}",
            "head": "another history",
            "reports": OTHER_REPORTS,
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
class Rerun:
    """The proof that all members agreed to run a sum again.

    Attributes:
        view: in which they did.
        number: of the new sum in that view.
        reports: everybody's report when the view was formed, and the signature.
        readies: what the members of the group were ready with, and the signature.
    """

    view: bytes
    number: int
    reports: Mapping[PeerId, tuple[bytes, bytes]]
    readies: Mapping[PeerId, tuple[bytes, bytes]]

    def voids(self, me: PeerId, group: str, mark: Mark, keys: Mapping[PeerId, PublicKeys]) -> bool:
        """Tell whether this proves that all agreed to run the sum of our mark again, ourselves among them."""
        if me not in self.reports or not set(mark.members) <= self.reports.keys() & self.readies.keys() & keys.keys():
            return False
        said = digest_of_reports({name: content for name, (content, _) in self.reports.items()})
        try:
            for name in mark.members:
                row = Report.from_bytes(self.reports[name][0]).groups[group]
                terms = Terms.from_bytes(read_ready(self.readies[name][0])[2])
                if row.length > mark.place or (terms.place, terms.reports) != (mark.place, said):
                    return False
            own = Report.from_bytes(self.reports[me][0]).groups[group]
        except (ValueError, TypeError, KeyError):
            return False
        return own.mark == mark.opening and all(
            keys[name].verify(statement(kind, slot, sha256(content).digest()), signature)
            for kind, slot, said_by in (
                ("standing", slot_of(self.view), self.reports),
                ("ready", slot_of(self.view, group, self.number), self.readies),
            )
            for name, (content, signature) in said_by.items()
            if name in keys
        )

    def to_json(self) -> list[Any]:
        """Encode it."""
        reports = {name: [content.decode(), signature.hex()] for name, (content, signature) in self.reports.items()}
        readies = {name: [content.hex(), signature.hex()] for name, (content, signature) in self.readies.items()}
        return [self.view.hex(), self.number, reports, readies]

    @classmethod
    def from_json(cls, value: Any) -> Rerun:
        """Read what `to_json` made; a ValueError or TypeError if it is malformed."""
        view, number, reports, readies = value
        if type(number) is not int or not 0 <= number < 2**63:
            raise ValueError("a rerun is malformed")
        return cls(
            bytes.fromhex(view),
            number,
            {str(name): (text.encode(), bytes.fromhex(signature)) for name, (text, signature) in reports.items()},
            {str(name): (bytes.fromhex(text), bytes.fromhex(signature)) for name, (text, signature) in readies.items()},
        )


@dataclass(frozen=True)
class Mark:
    """What a member writes down before the key of its seal leaves it.

    Attributes:
        place: of the sum in the history.
        members: of the sum.
        opening: the digest that all members have signed.
        rerun: the proof that all agreed to run it again, if they did; then this opening is void.
    """

    place: int
    members: tuple[PeerId, ...]
    opening: bytes
    rerun: Rerun | None = None

    def to_json(self) -> list[Any]:
        """Encode it."""
        return [self.place, self.members, self.opening.hex(), self.rerun and self.rerun.to_json()]

    @classmethod
    def from_json(cls, value: Any) -> Mark:
        """Read what `to_json` made; a ValueError or TypeError if it is malformed."""
        place, members, opening, rerun = value
        if type(place) is not int or not all(isinstance(name, str) for name in members):
            raise ValueError("a mark is malformed")
        return cls(place, tuple(members), bytes.fromhex(opening), None if rerun is None else Rerun.from_json(rerun))


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
    another attempt, or have agreed to run the sum again. And who has not shown its own key in this attempt waits for
    those who have: as long as they have not finished the sum, they may agree to run it again.

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
        elif row.length == place and row.mark is not None and (row.mark != opening or row.void):
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
