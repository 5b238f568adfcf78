"""Journals of finished sums with their certificates, as members would have made them together."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np

from cgd.secagg.certificates import Certificate, Terms, attempt_digest
from cgd.secagg.codec import spec_bytes
from cgd.secagg.journal import Journal
from cgd.secagg.journal_entry import Step
from cgd.secagg.masking import add_self_mask
from cgd.secagg.statements import slot_of, statement
from support.identities import identity

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from cgd.secagg.messages import SumSpec

VIEW = sha256(b"a view of before").digest()


def self_mask_key(member: str, number: int) -> bytes:
    return sha256(f"seal of {member} in {number}".encode()).digest()[:16]  # this text is in golden digests


def certify(
    spec: SumSpec,
    total: npt.NDArray[Any],
    terms: Terms,
    members: Sequence[str],
    number: int = 1,
    group: str = "everyone",
) -> Certificate:
    """Make the certificate that these members would have made of this total."""
    keys = {member: self_mask_key(member, number) for member in sorted(members)}
    words = total.copy()
    for key in keys.values():
        add_self_mask(words, key)
    masked_digest = sha256(words.data).digest()
    commitments = {member: sha256(key).digest() for member, key in keys.items()}
    attempt = attempt_digest(masked_digest, spec, terms.to_bytes(), commitments)
    signed = statement("confirm", slot_of(VIEW, group, number), sha256(attempt).digest())
    signatures = {member: identity(member).sign(signed) for member in keys}
    return Certificate(VIEW, number, spec_bytes(spec), terms.to_bytes(), masked_digest, keys, signatures)


def append_certified(
    journal: Journal,
    spec: SumSpec,
    total: npt.NDArray[Any],
    members: Sequence[str],
    epoch: int = 1,
    step: Step | None = None,
    group: str = "everyone",
) -> Certificate:
    """Append a sum that these members have finished, with its certificate."""
    index = len(journal)
    optimizer_step = None if step is None else (step.slot, step.number)
    terms = Terms(epoch, index, journal.head, 0, optimizer_step, journal.fixed_states_digest())
    certificate = certify(spec, total, terms, members, index + 1, group)
    journal.append(spec, total, epoch, 0, step, len(members), certificate)
    return certificate


def certified_journal(spec: SumSpec, totals: Iterable[bytes], members: Sequence[str]) -> Journal:
    """Make the journal of members that have finished these sums."""
    journal = Journal()
    for total in totals:
        append_certified(journal, spec, np.frombuffer(total, dtype="<u4").copy(), members)
    return journal


def numbered_journal(spec: SumSpec, sums: int, members: Sequence[str], *, steps: bool = False) -> Journal:
    """Make the journal of this many sums with different totals; with `steps`, each is a step of an optimiser."""
    journal = Journal()
    for number in range(sums):
        step = Step(0, number) if steps else None
        append_certified(journal, spec, numbered_total(spec.size, number), members, step=step)
    return journal


def numbered_total(size: int, number: int) -> npt.NDArray[Any]:
    """Return the total of sum `number` in `numbered_journal`."""
    return np.arange(size, dtype="<u4") + 10 * number
