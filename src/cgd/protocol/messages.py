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
LONGEST_NAME = 255  # bytes; its length travels in one byte


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
    """I am at this sum, under these settings; `seal` is the digest of the key that I shall open my seal with."""

    spec: SumSpec
    seal: bytes


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
class Again:
    """From the hub: I have nothing of yours; deposit again whatever is not confirmed."""


@dataclass(frozen=True)
class Confirm:
    """The digest of the whole sealed total as I have it, and of everybody's seals."""

    digest: bytes


@dataclass(frozen=True)
class Unseal:
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

    `knows` is the ephemeral key of yours that I have, or zeros: if it is not your present one, tell me.
    """

    ephemeral: bytes
    knows: bytes
    version: str
    federation: str
    epoch: int
    sections: tuple[tuple[str, str], ...]
    """The digest of every section of the federation file, by its name."""


@dataclass(frozen=True)
class Standing:
    """How many sums of every group I have finished, since the federation began.

    `contribution` is my part of the key that all members have in common: random bytes.
    """

    finished: tuple[tuple[str, int], ...]
    contribution: bytes


@dataclass(frozen=True)
class Ask:
    """Catch me up: give me your ledger of this group."""

    group: str


@dataclass(frozen=True)
class Piece:
    """A slice of my ledger of a group, from byte `start` on; it has `size` bytes in all."""

    start: int
    group: str
    size: int
    words: Buffer


@dataclass(frozen=True)
class Farewell:
    """My program is done (or, if not `done`, stopped), and I stay only until everybody's is."""

    done: bool


Slice = Share | Subtotal | Total
OfASum = Ready | Slice | Confirm | Unseal | Abort | Leave
OfAnAssembly = Hello | Standing | Ask | Piece | Farewell | Again
Message = OfASum | OfAnAssembly | Deposit
