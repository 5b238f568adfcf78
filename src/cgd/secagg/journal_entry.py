"""The entry of a finished sum in the journal (`journal.py`), and the optimiser step that it may belong to."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cgd.secagg.certificates import Certificate
    from cgd.secagg.messages import Buffer


@dataclass(frozen=True)
class Step:
    """A step of an optimiser; `slot` identifies the optimiser in the program."""

    slot: int
    number: int


@dataclass(frozen=True)
class JournalEntry:
    """One finished sum.

    Attributes:
        description: the description of the summed values.
        epoch: the epoch of the sum.
        loop_step: the step of the program's loop.
        step: the optimiser step whose state will include the sum, if any.
        size: the size of the total in bytes.
        addends: the number of members.
        attempt: the digest of the attempt that finished the sum; see `certificates.attempt_digest`.
        words: the total, if it is kept.
        certificate: the proof of the total, if it is kept.
    """

    description: str
    epoch: int
    loop_step: int
    step: Step | None
    size: int
    addends: int
    attempt: bytes
    words: Buffer | None = None
    certificate: Certificate | None = None

    @property
    def fields(self) -> list[Any]:
        """The fields that the hash chain covers."""
        step = self.step and list(astuple(self.step))
        return [self.description, self.epoch, self.loop_step, step, self.size, self.addends, self.attempt.hex()]
