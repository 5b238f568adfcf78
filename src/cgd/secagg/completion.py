"""Completion: with a quorum, a sum that was interrupted while it was opened is completed without the absent members.

When the present members form a view without one that was in the last sum, somebody may know the total of that sum: each
member reveals its self-mask key as soon as all have confirmed. If the others summed the same step again among
themselves, the difference of the two totals would be the addend of the absent member. So a sum for which a present
member has a pending reveal is never summed again by others: this very attempt is completed. The rules:

1. Each member deals shares of its self-mask key (`key_shares.py`) to all before it confirms. So once all have
   confirmed, as many members as the quorum can recover the key of an absent one. It charges its budget before that.
2. A member hands out the keys and shares that it has of an attempt (`CompleteSum`) only to members of its view, only if
   the statements of all members prove that all confirmed, and only if it has started no attempt in a later view. It
   records a pending reveal before, as if it revealed its own key.
3. A member that starts a sum in a later view deletes what it has of earlier attempts. So if a quorum has gone on, too
   few are left to complete the attempt, and if a quorum has begun to complete it, too few are left to go on: two
   quorums have an honest member in common. A pending reveal is void when so many members of its sum report that they
   have gone on without it that, even if some of them lie, too few are left to open it (`has_gone_on`).
4. The completed sum has an ordinary certificate: the statements and the keys of all its members.

If the shares do not suffice, or no present member has the masked total, the same members repeat the sum, as without a
quorum. Until all of them are present, the others wait. The members that have its record send the statements of all,
which prove it: otherwise a dishonest member could invent such a sum, and so leave out whom it wants.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import combinations, islice
from typing import TYPE_CHECKING, Any

from cgd.secagg.attendance import epoch_of
from cgd.secagg.certificates import Certificate, Terms, attempt_digest
from cgd.secagg.codec import read_spec
from cgd.secagg.key_shares import recover
from cgd.secagg.masking import remove_self_masks
from cgd.secagg.messages import KEY_SHARE_BYTES, SELF_MASK_KEY_BYTES
from cgd.secagg.statements import slot_of, statement

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    import numpy.typing as npt

    from cgd.secagg.federation_spec import FederationSpec, PublicKeys
    from cgd.secagg.messages import PeerId, SumSpec
    from cgd.secagg.positions import GroupPosition, Participation

MAX_COMBINATIONS = 100  # of shares, one of which may be wrong


@dataclass
class InterruptedSum:
    """What a member has of an attempt at a sum that it confirmed.

    Attributes:
        view: the digest of the view.
        number: the number of the sum in the view.
        spec: its settings, encoded.
        terms: its terms, encoded.
        masked_digest: the digest of the masked total.
        commitments: the members' commitments to their self-mask keys.
        signatures: the signatures of the `Confirm` statements that were received.
        keys: the self-mask keys that are known, with our own.
        shares: the shares of the members' keys, by the member whose key it is and the one whose share it is.
        masked: the masked total, if this process has received it.
    """

    view: bytes
    number: int
    spec: bytes
    terms: bytes
    masked_digest: bytes
    commitments: dict[PeerId, bytes]
    signatures: dict[PeerId, bytes]
    keys: dict[PeerId, bytes]
    shares: dict[PeerId, dict[PeerId, bytes]] = field(default_factory=dict)
    masked: npt.NDArray[Any] | None = None

    @property
    def attempt(self) -> bytes:
        """The digest that identifies the attempt."""
        return attempt_digest(self.masked_digest, self.spec, self.terms, self.commitments)

    @property
    def members(self) -> tuple[PeerId, ...]:
        """The members of the sum."""
        return tuple(sorted(self.commitments))

    @property
    def decoded_terms(self) -> Terms:
        """The terms of the sum."""
        return Terms.from_bytes(self.terms)

    @property
    def epoch(self) -> int:
        """The period in which it was made."""
        return self.decoded_terms.epoch

    @property
    def index(self) -> int:
        """Its index in the journal."""
        return self.decoded_terms.index

    @property
    def sum_spec(self) -> SumSpec:
        """The settings of the sum."""
        return read_spec(self.spec)

    def is_proved(self, group: str, keys: Mapping[PeerId, PublicKeys]) -> bool:
        """Return whether all its members have signed that they confirm it."""
        if self.signatures.keys() != self.commitments.keys() or not self.commitments.keys() <= keys.keys():
            return False
        signed = statement("confirm", slot_of(self.view, group, self.number), sha256(self.attempt).digest())
        return all(keys[name].verify(signed, signature) for name, signature in self.signatures.items())

    @property
    def proof(self) -> InterruptedSum:
        """What proves that all its members have confirmed it, without a key or a share."""
        return replace(self, keys={}, shares={}, masked=None)

    def add(self, sender: PeerId, other: InterruptedSum) -> None:
        """Add the keys and shares that another member has of the same attempt; wrong keys are dropped."""
        for name, key in other.keys.items():
            if name in self.commitments and sha256(key).digest() == self.commitments[name]:
                self.keys[name] = key
        for name, shares in other.shares.items():
            if name in self.commitments and sender in shares:
                self.shares.setdefault(name, {})[sender] = shares[sender]

    def recover_keys(self, threshold: int) -> bool:
        """Recover missing keys from the shares; return whether all keys are known."""
        for name in self.commitments.keys() - self.keys.keys():
            shares = self.shares.get(name, {})
            for chosen in islice(combinations(sorted(shares), threshold), MAX_COMBINATIONS):
                key = recover({holder: shares[holder] for holder in chosen}, self.members)
                if sha256(key).digest() == self.commitments[name]:
                    self.keys[name] = key
                    break
        return self.keys.keys() == self.commitments.keys()

    def open(self) -> tuple[npt.NDArray[Any], Certificate]:
        """Return the total and its certificate, when all keys and the masked total are known."""
        assert self.masked is not None  # noqa: S101 - for the type checker
        total = self.masked.copy()
        remove_self_masks(total, list(self.keys.values()))
        proof = self.view, self.number, self.spec, self.terms, self.masked_digest
        return total, Certificate(*proof, dict(self.keys), dict(self.signatures))

    def to_json(self, only: PeerId | None = None) -> list[Any]:
        """Encode all but the masked total as JSON values; with `only`, of the shares those of this member."""
        texts = self.view.hex(), self.number, self.spec.hex(), self.terms.decode(), self.masked_digest.hex()
        shares = {
            name: {holder: share.hex() for holder, share in each.items() if only in (None, holder)}
            for name, each in sorted(self.shares.items())
        }
        return [*texts, *map(_hexadecimal, (self.commitments, self.signatures, self.keys)), shares]

    @classmethod
    def from_json(cls, value: Any) -> InterruptedSum:
        """Decode the result of `to_json`; raise a ValueError or TypeError if it is malformed."""
        view, number, spec, terms, masked_digest, commitments, signatures, keys, shares = value
        if type(number) is not int or not 0 <= number < 2**63:
            raise ValueError("the number of an interrupted sum is malformed")
        Terms.from_bytes(terms.encode())
        read_spec(bytes.fromhex(spec))
        encoded = bytes.fromhex(view), number, bytes.fromhex(spec), terms.encode(), bytes.fromhex(masked_digest)
        found = _decoded(commitments, 32), _decoded(signatures, 64), _decoded(keys, SELF_MASK_KEY_BYTES)
        return cls(*encoded, *found, {str(name): _decoded(each, KEY_SHARE_BYTES) for name, each in shares.items()})

    @classmethod
    def from_bytes(cls, content: bytes) -> InterruptedSum:
        """Decode the content of a `CompleteSum`.

        Raises:
            ValueError: it is malformed.
        """
        try:
            return cls.from_json(json.loads(content))
        except (TypeError, AttributeError, KeyError, RecursionError) as error:
            raise ValueError(str(error)) from None


@dataclass(frozen=True)
class OpenSums:
    """What the first reports say about attempts that may have been opened, at the place of the next sum.

    Attributes:
        void: the members whose pending reveal is void: those present have gone on without it.
        void_steps: the members whose record of a step that may have been revealed is void.
        attempt: the attempt to complete, if there is one.
        only: the members that have to repeat a sum before the next one, because nobody can complete it.
        repeated: the attempt at that sum. One member may have invented it, so it has to be proved.
    """

    void: frozenset[PeerId] = frozenset()
    void_steps: frozenset[PeerId] = frozenset()
    attempt: bytes | None = None
    only: frozenset[PeerId] = frozenset()
    repeated: bytes | None = None


def has_gone_on(
    positions: Mapping[PeerId, GroupPosition], members: Collection[PeerId], period: int, federation_spec: FederationSpec
) -> bool:
    """Return whether so many members of an attempt report that they have gone on that it was and will not be opened.

    Whoever has gone on without a pending reveal of the attempt has handed out nothing of it, and never will. To open
    it, the shares of a quorum are needed, or the keys of all. So if it was opened, at most n − q of its n members have
    gone on, and more of them may say so if they are dishonest. Members that repeat it keep a pending reveal of it.

    Args:
        positions: the first reports of the members of the view.
        members: the members of the attempt.
        period: the period in which it was made. Numbers of earlier epochs, with other quorums, prove nothing.
        federation_spec: the federation spec.
    """
    if epoch_of(period) != federation_spec.epoch or federation_spec.quorum is None:
        return False
    of_attempt = set(members)
    reports = [_part(positions[name]) for name in of_attempt & positions.keys()]
    gone_on = sum(each.started > period and of_attempt not in _revealed_with(each) for each in reports)
    return gone_on > len(of_attempt) - federation_spec.quorum + federation_spec.tolerated


def _revealed_with(part: Participation) -> list[set[PeerId]]:
    """Return the members of the sums that a member may have revealed."""
    return [set(part.members), *([] if part.step is None else [set(part.step.members)])]


def find_open_sums(
    positions: Mapping[PeerId, GroupPosition],
    federation_spec: FederationSpec,
    is_finished: Callable[[int, int], bool] = lambda _slot, _number: False,
) -> OpenSums:
    """Compare the first reports of all members of a view; all of them come to the same result.

    Args:
        positions: the first reports.
        federation_spec: the federation spec.
        is_finished: returns whether the gradient sum of a step, given by its slot and number, is in the journal.
    """
    quorum, known = federation_spec.quorum or len(federation_spec.members), set(federation_spec.members)
    longest = max(position.length for position in positions.values())
    pending = {
        name: (_part(each).revealed_in, each.pending_reveal, _part(each).members)
        for name, each in positions.items()
        if each.length == longest and each.pending_reveal is not None
    }
    steps = {
        name: (step.period, step.attempt, step.members)
        for name, each in positions.items()
        if (step := _part(each).step) is not None and not is_finished(step.slot, step.number)
    }
    found = []
    for revealed in (pending, steps):
        gone = {name for name, each in revealed.items() if has_gone_on(positions, each[2], each[0], federation_spec)}
        # No sum has fewer members than the quorum. One with former members cannot be completed or repeated, and neither
        # can one of period 0, from before there was a quorum: then `_check_members` in group.py stops the training.
        live = [each for name, each in revealed.items() if name not in gone and each[0] and known >= {*each[2]}]
        live = sorted((each for each in live if len({*each[2]}) >= quorum), reverse=True)
        found.append((frozenset(gone), live))
    (void, attempts), (void_steps, of_steps) = found
    for _, attempt, members in attempts:
        with_material = {name for name, each in positions.items() if _part(each).material == attempt} & {*members}
        if len(with_material) >= quorum and any(_part(positions[name]).has_total for name in with_material):
            return OpenSums(void, void_steps, attempt)
    for _, attempt, members in [*attempts, *of_steps]:
        if (only := frozenset(members)) != positions.keys():
            return OpenSums(void, void_steps, only=only, repeated=attempt)
    return OpenSums(void, void_steps)


def _part(position: GroupPosition) -> Participation:
    assert position.attendance is not None  # noqa: S101 - for the type checker: `PositionReports` checks it
    return position.attendance


def _hexadecimal(values: Mapping[PeerId, bytes]) -> dict[PeerId, str]:
    return {name: value.hex() for name, value in sorted(values.items())}


def _decoded(values: Mapping[PeerId, str], size: int) -> dict[PeerId, bytes]:
    found = {str(name): bytes.fromhex(value) for name, value in values.items()}
    if any(len(value) != size for value in found.values()):
        raise ValueError("an interrupted sum is malformed")
    return found
