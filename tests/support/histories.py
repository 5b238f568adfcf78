"""Finished sums with their proofs, as if members had made them together."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np

from cgd.secagg.certificates import Certificate, Terms, opening_digest
from cgd.secagg.codec import spec_bytes
from cgd.secagg.journal import Journal
from cgd.secagg.masking import seal
from cgd.secagg.statements import slot_of, statement
from support.identities import identity

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from cgd.secagg.journal import Step
    from cgd.secagg.messages import SumSpec

VIEW = sha256(b"a view of before").digest()


def seal_key(member: str, number: int) -> bytes:
    return sha256(f"seal of {member} in {number}".encode()).digest()[:16]


def certify(
    spec: SumSpec,
    total: npt.NDArray[Any],
    terms: Terms,
    members: Sequence[str],
    number: int = 1,
    group: str = "everyone",
) -> Certificate:
    """Make the certificate that these members would have made of this total."""
    keys = {member: seal_key(member, number) for member in sorted(members)}
    words = total.copy()
    for key in keys.values():
        seal(words, key)
    sealed = sha256(words.data).digest()
    seals = [sha256(key).digest() for key in keys.values()]
    opening = opening_digest(sealed, spec, terms.to_bytes(), seals)
    signed = statement("confirm", slot_of(VIEW, group, number), sha256(opening).digest())
    signatures = {member: identity(member).sign(signed) for member in keys}
    return Certificate(VIEW, number, spec_bytes(spec), terms.to_bytes(), sealed, keys, signatures)


def enter(
    journal: Journal,
    spec: SumSpec,
    total: npt.NDArray[Any],
    members: Sequence[str],
    epoch: int = 1,
    step: Step | None = None,
    group: str = "everyone",
) -> Certificate:
    """Enter a sum that these members have finished, with its proof."""
    place = len(journal)
    placed = None if step is None else (step.slot, step.number)
    terms = Terms(epoch, place, journal.head, 0, placed, journal.kept_digest())
    certificate = certify(spec, total, terms, members, place + 1, group)
    journal.append(spec, total, epoch, 0, step, len(members), certificate)
    return certificate


def history(spec: SumSpec, totals: Iterable[bytes], members: Sequence[str]) -> Journal:
    """The ledger of members that have finished these sums."""
    journal = Journal()
    for total in totals:
        enter(journal, spec, np.frombuffer(total, dtype="<u4").copy(), members)
    return journal
