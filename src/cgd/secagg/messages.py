"""What members say to each other. Messages are frozen and hold plain data; `frames.py` makes bytes of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Literal

PeerId = str
"""A member's name, unique in its session."""

HUB: PeerId = "the hub"
"""What the hub is called; no participant can be, since their names have no spaces."""

Buffer = bytes | memoryview
"""Ring elements as they travel: little-endian, one behind the other."""

Sharing = Literal["expanded", "uniform"]
Opening = Literal["mesh", "aggregator", "hub"]
SHARINGS: tuple[Sharing, ...] = ("expanded", "uniform")
OPENINGS: tuple[Opening, ...] = ("mesh", "aggregator", "hub")

SESSION_BYTES = 16
DIGEST_BYTES = 32
SEAL_KEY_BYTES = 16
CONTRIBUTION_BYTES = 32
EPHEMERAL_BYTES = 32
SIGNATURE_BYTES = 64
TAG_BYTES = 16
NO_SIGNATURE = bytes(SIGNATURE_BYTES)
"""What stands for a signature among members of one process, who do not sign."""
MAX_NAME_BYTES = 255  # bytes; its length travels in one byte


class Reason(IntEnum):
    """Why a member gives up a sum: a code, because a free text could carry a value."""

    RANGE = 1
    SETTINGS = 2
    PEER = 3
    STOPPED = 4
    AHEAD = 5
    DIFFERS = 6
    HUB = 7

    @property
    def text(self) -> str:
        """The reason in words, as the other members read it."""
        return {
            Reason.RANGE: "one of its values is not finite or beyond the bound (its own error says which)",
            Reason.SETTINGS: "its values or settings cannot be summed (its own error says why)",
            Reason.PEER: "it saw a peer break the protocol",
            Reason.STOPPED: "its program stopped before the sum",
            Reason.AHEAD: "it is at a later sum already",
            Reason.DIFFERS: "members differ in their settings or totals (the odd one's own error says in what)",
            Reason.HUB: "it saw the hub break the protocol (its own error says how)",
        }[self]


@dataclass(frozen=True)
class SumSpec:
    """What all members of one sum must agree on before anything is shared.

    `context` is whatever else the caller wants to be the same everywhere; an optimiser puts its settings and a digest
    of the displacement there, so that members that have drifted apart notice before they share.
    """

    shape: tuple[int, ...]
    dtype: str
    ring_bits: int
    fraction_bits: int
    sharing: Sharing
    opening: Opening
    aggregator: PeerId = ""
    context: str = ""
    weighted: bool = False

    @property
    def size(self) -> int:
        """The number of ring elements: the values', and one more for the weight if the addends have one."""
        return math.prod(self.shape) + self.weighted

    def differences(self, other: SumSpec) -> list[str]:
        """What `other` has differently, in words."""
        pairs = [(field.name, getattr(self, field.name), getattr(other, field.name)) for field in fields(self)]
        return [f"{name} {theirs!r} instead of {ours!r}" for name, ours, theirs in pairs if ours != theirs]


@dataclass(frozen=True)
class Ready:
    """I am at this sum, under these settings.

    Attributes:
        spec: the settings.
        seal: the digest of the key that I shall open my seal with.
        terms: in a federation, where I am in the common history (`history.Terms`); empty in a local session.
        signature: mine, over all of it.
    """

    spec: SumSpec
    seal: bytes
    terms: bytes = b""
    signature: bytes = NO_SIGNATURE


@dataclass(frozen=True)
class Share:
    """A slice of the share of my secret that is yours (uniform sharing), from element `start` on."""

    start: int
    words: Buffer


@dataclass(frozen=True)
class Subtotal:
    """A slice of my subtotal, of the part that you add up."""

    start: int
    words: Buffer


@dataclass(frozen=True)
class Total:
    """A slice of the sealed total of the part that I add up."""

    start: int
    words: Buffer


@dataclass(frozen=True)
class Deposit:
    """A slice of my subtotal with its tags, for the hub to add up; `bits` are those of the ring."""

    start: int
    group: str
    bits: int
    words: Buffer


@dataclass(frozen=True)
class ResendRequest:
    """From the hub: I have nothing of yours; deposit again whatever is not confirmed."""


@dataclass(frozen=True)
class Confirm:
    """The digest of the whole sealed total as I have it, and of what all were ready with; signed."""

    digest: bytes
    signature: bytes = NO_SIGNATURE


@dataclass(frozen=True)
class RevealKey:
    """The key of my seal."""

    key: bytes


@dataclass(frozen=True)
class Abort:
    """I cannot take part in this sum; later ones may go on."""

    reason: Reason


@dataclass(frozen=True)
class Leave:
    """I take part in no sum after this one."""


@dataclass(frozen=True)
class Hello:
    """I am here, in this life of mine (`ephemeral` is its public key), under this charter.

    `knows` is the ephemeral key of yours that I have, or zeros: if it is not your present one, tell me. All but that is
    signed.
    """

    ephemeral: bytes
    knows: bytes
    version: str
    federation: str
    epoch: int
    sections: tuple[tuple[str, str], ...]
    """The digest of every section of the federation file, by its name."""
    signature: bytes = NO_SIGNATURE


@dataclass(frozen=True)
class JournalPosition:
    """Where I stand in every group that I sum with, in this view.

    Attributes:
        content: what I report (`standings.PositionReport`), as JSON; all members are told the same.
        signature: mine, over the content.
        tag: proves to the recipient that my ephemeral key is mine (`ephemeral.PairKeys`).
        contributions: by group, my part of the key that its members have in common; for members of the group only.
        greetings: by member, the ephemeral key that I have of it, and its signature.
    """

    content: bytes
    signature: bytes
    tag: bytes = bytes(TAG_BYTES)
    contributions: tuple[tuple[str, bytes], ...] = ()
    greetings: tuple[tuple[PeerId, bytes, bytes], ...] = ()


@dataclass(frozen=True)
class PositionsGathered:
    """I have everybody's first report in this view; this is the digest of all of them."""

    digest: bytes


@dataclass(frozen=True)
class SignedEvidence:
    """What members have signed, as I was told it: whoever told you something else is dishonest.

    Attributes:
        kind: of the statement.
        slot: the digest of what it is about.
        said: by member, the digest of what it says, and the signature.
    """

    kind: str
    slot: bytes
    said: tuple[tuple[PeerId, bytes, bytes], ...]


@dataclass(frozen=True)
class JournalRequest:
    """Catch me up: give me what your ledger of this group has behind so many sums, and the states if I want them."""

    group: str
    since: int = 0
    states: bool = True


@dataclass(frozen=True)
class JournalChunk:
    """A slice of my ledger of a group, from byte `start` on; it has `size` bytes in all."""

    start: int
    group: str
    size: int
    words: Buffer


@dataclass(frozen=True)
class Goodbye:
    """My program is done (or, if not `done`, stopped), and I stay only until everybody's is.

    `ends` has, by group, how many sums I have finished and the digest of everything that I hold of them.
    """

    done: bool
    ends: tuple[tuple[str, int, bytes], ...] = ()


Slice = Share | Subtotal | Total
SumMessage = Ready | Slice | Confirm | RevealKey | Abort | Leave
MembershipMessage = (
    Hello
    | JournalPosition
    | PositionsGathered
    | SignedEvidence
    | JournalRequest
    | JournalChunk
    | Goodbye
    | ResendRequest
)
Message = SumMessage | MembershipMessage | Deposit
