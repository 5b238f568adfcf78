"""Claims: find out which values at least two members have, without disclosing a value that only one has.

For each of its values, a member enters a claim into a sum of sets (`cgd.tabular.lookup_table`):

    key of the value   K = H(salt; column, value)        never sent
    mark               H(K; "mark")                      the same for every member that has the value
    nonce              H(secret of the member; K)        differs from member to member
    tag                H(K; nonce)                       only who knows the value can compute it

A value is shared if two claims with different nonces have valid tags. Only its owners, who know K, can check that, and
only then do they open the text. The number of claims proves nothing, but a tag does: a dishonest member cannot derive a
second claim from one that it sees, nor by adding anything to the cells of the table, whatever the counts in it are. It
must know the value. So no member can have the text of a value opened that it does not know already.

The salt contains the name of the federation, the columns and the number of the attempt, so a claim from elsewhere is
not valid. The nonce does not change if a sum is repeated after a restart, so a member recognises its own claim if
somebody enters that again. (With a new key file it has other nonces. Then the training needs another name, too.)

Disclosed to every member: the number of claims, and how many marks occur once, twice and so on. Besides, a member that
*guesses* a value can compute its mark, and so test whether other members have it, and how many. Claims do not show who.
Values that must not be tested in this way are not claimed (`cgd.tabular.rare_values`).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from cgd.peers import Peers

MARK_BYTES, NONCE_BYTES, TAG_BYTES = 8, 8, 16
CLAIM_BYTES = MARK_BYTES + NONCE_BYTES + TAG_BYTES
MIN_PARTICIPANTS = 2


def salt(peers: Peers, columns: Iterable[str], context: str, attempt: int) -> bytes:
    """Return the salt of the claims in an attempt.

    Args:
        peers: the members of the sum.
        columns: the columns of the table that these members hold: in a grid, other groups hold other ones.
        context: what the claims are about.
        attempt: the number of the attempt.
    """
    scope = hashlib.sha256(peers.federation.encode() or peers.session_id)
    for text in (*columns, context, str(attempt)):
        scope.update(hashlib.sha256(text.encode()).digest())
    return scope.digest()


@dataclass(frozen=True)
class Claims:
    """The opened claims of all members, in one attempt.

    Attributes:
        salt: the salt of the attempt.
        by_mark: the claims with each mark.
        needed: how many members must have a value for it to be shared.
    """

    salt: bytes
    by_mark: Mapping[bytes, frozenset[bytes]]
    needed: int = MIN_PARTICIPANTS

    @classmethod
    def opened(cls, salt: bytes, claims: Iterable[bytes], members: int) -> Claims:
        """Return opened claims of some members. One who trains alone discloses nothing, and shares all values."""
        by_mark: dict[bytes, set[bytes]] = {}
        for claim in claims:
            by_mark.setdefault(claim[:MARK_BYTES], set()).add(claim)
        found = {mark: frozenset(each) for mark, each in by_mark.items()}
        return cls(salt, found, min(MIN_PARTICIPANTS, members))

    def __len__(self) -> int:
        return sum(map(len, self.by_mark.values()))

    def participants(self, value: bytes) -> int:
        """Return the number of members that have proved that they know a value."""
        key = _key(self.salt, value)
        valid = {
            nonce
            for each in self.by_mark.get(_mark(key), ())
            if each[-TAG_BYTES:] == _tag(key, nonce := each[MARK_BYTES:-TAG_BYTES])
        }
        return len(valid)

    def is_shared(self, value: bytes) -> bool:
        """Return whether two members or more know a value."""
        return self.participants(value) >= self.needed

    def contain(self, claim: bytes) -> bool:
        """Return whether a claim is among them."""
        return claim in self.by_mark.get(claim[:MARK_BYTES], ())


def member_secret(peers: Peers) -> bytes:
    """Return the secret of a member for its claims, the same after a restart."""
    return hashlib.blake2b(peers.me.encode(), key=peers.seed, digest_size=32, person=b"cgd claims").digest()


def make_claim(salt: bytes, secret: bytes, value: bytes) -> bytes:
    """Return a member's claim that it has a value."""
    key = _key(salt, value)
    nonce = hashlib.blake2b(key, key=secret, digest_size=NONCE_BYTES, person=b"cgd nonce").digest()
    return _mark(key) + nonce + _tag(key, nonce)


def _key(salt: bytes, value: bytes) -> bytes:
    return hashlib.blake2b(value, key=salt, digest_size=32, person=b"cgd value").digest()


def _mark(key: bytes) -> bytes:
    return hashlib.blake2b(key=key, digest_size=MARK_BYTES, person=b"cgd mark").digest()


def _tag(key: bytes, nonce: bytes) -> bytes:
    return hashlib.blake2b(nonce, key=key, digest_size=TAG_BYTES, person=b"cgd tag").digest()
