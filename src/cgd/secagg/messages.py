"""The messages of the protocol: frozen dataclasses of plain data; `codec.py` encodes them.

`Outbox` is the queue of outgoing messages.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Collection


PeerId = str
"""A member's name, unique in its session."""

HUB: PeerId = "the hub"
"""The name of the hub; no participant can have it, since their names have no spaces."""

Buffer = bytes | memoryview
"""Ring elements as they are sent: little-endian, without gaps."""

Masking = Literal["pairwise", "uniform"]
Opening = Literal["mesh", "aggregator", "hub"]
MASKINGS: tuple[Masking, ...] = ("pairwise", "uniform")
OPENINGS: tuple[Opening, ...] = ("mesh", "aggregator", "hub")

SESSION_BYTES = 16
DIGEST_BYTES = 32
SELF_MASK_KEY_BYTES = 16
CONTRIBUTION_BYTES = 32
EPHEMERAL_BYTES = 32
SIGNATURE_BYTES = 64
TAG_BYTES = 16
KEY_SHARE_BYTES = 17
NO_SIGNATURE = bytes(SIGNATURE_BYTES)
"""The signature field of messages between members of one process, which do not sign."""
MAX_NAME_BYTES = 255  # the length of a name is sent in one byte


class Reason(IntEnum):
    """The reason for which a member aborts a sum: a code, because a free text could contain a value."""

    RANGE = 1
    SETTINGS = 2
    PEER = 3
    STOPPED = 4
    AHEAD = 5
    DIFFERS = 6
    HUB = 7

    @property
    def text(self) -> str:
        """The reason as a text for the other members."""
        return {
            Reason.RANGE: "one of its values is not finite or beyond the bound (its own error names the value)",
            Reason.SETTINGS: "its values or settings cannot be summed (its own error names the cause)",
            Reason.PEER: "it detected that a peer violated the protocol",
            Reason.STOPPED: "its program stopped before the sum",
            Reason.AHEAD: "it is already at a later sum",
            Reason.DIFFERS: "members differ in their settings or totals (the error of the deviating member names them)",
            Reason.HUB: "it detected that the hub violated the protocol (its own error names the cause)",
        }[self]


WEIGHT_DIGIT_BITS = 4


@dataclass(frozen=True)
class SumSpec:
    """The settings that all members of one sum must agree on before anything is opened.

    `context` is any other text that must be the same for all members. An optimiser uses its settings and a digest of
    the displacement, so that members with different displacements are detected before anything is opened.
    """

    shape: tuple[int, ...]
    dtype: str
    ring_bits: int
    fraction_bits: int
    masking: Masking
    opening: Opening
    aggregator: PeerId = ""
    context: str = ""
    weighted: bool = False

    @property
    def size(self) -> int:
        """The number of ring elements: one for each value, and those of the weight if the sum is weighted."""
        return math.prod(self.shape) + (self.weight_elements if self.weighted else 0)

    @property
    def weight_elements(self) -> int:
        """The number of elements of the weight: in 16 bits, the digits of 32 bits."""
        return 32 // WEIGHT_DIGIT_BITS if self.ring_bits == 16 else 1

    def differences(self, other: SumSpec) -> list[str]:
        """Describe how `other` differs from these settings."""
        pairs = [(field.name, getattr(self, field.name), getattr(other, field.name)) for field in fields(self)]
        return [f"{name} {theirs!r} instead of {ours!r}" for name, ours, theirs in pairs if ours != theirs]


@dataclass(frozen=True)
class Ready:
    """The sender is ready for this sum.

    Attributes:
        spec: the settings of the sum.
        commitment: the commitment to the sender's self-mask key: its digest.
        terms: the sender's position in the history (`certificates.Terms`), encoded; empty in a local session.
        signature: the sender's signature over all of it.
    """

    spec: SumSpec
    commitment: bytes
    terms: bytes = b""
    signature: bytes = NO_SIGNATURE


@dataclass(frozen=True)
class Share:
    """A slice of the recipient's share of the sender's secret (uniform masking), from element `start` on."""

    start: int
    words: Buffer


@dataclass(frozen=True)
class Subtotal:
    """A slice of the sender's masked vector, of the part that the recipient adds."""

    start: int
    words: Buffer


@dataclass(frozen=True)
class Total:
    """A slice of the masked total of the part that the sender adds."""

    start: int
    words: Buffer


@dataclass(frozen=True)
class Deposit:
    """A slice of the sender's masked vector with its MAC tags, which the hub adds; `bits` are those of the ring."""

    start: int
    group: str
    bits: int
    words: Buffer


@dataclass(frozen=True)
class ResendRequest:
    """The hub lost the deposits of the recipient, which sends all unconfirmed deposits again."""


@dataclass(frozen=True)
class Confirm:
    """The signed digest of the masked total that the sender received, and of all `Ready` messages."""

    digest: bytes
    signature: bytes = NO_SIGNATURE


@dataclass(frozen=True)
class RevealKey:
    """The sender's self-mask key."""

    key: bytes


@dataclass(frozen=True)
class Abort:
    """The sender cannot take part in this sum; later sums are not affected."""

    reason: Reason


@dataclass(frozen=True)
class Leave:
    """The sender takes part in no sum after this one."""


@dataclass(frozen=True)
class Hello:
    """The announcement of a process: its ephemeral public key and its federation spec.

    `knows` is the recipient's ephemeral key that the sender received, or zeros: if it is not the current one, the
    recipient replies with its own hello. All fields except `knows` are signed.
    """

    ephemeral: bytes
    knows: bytes
    version: str
    federation: str
    epoch: int
    sections: tuple[tuple[str, str], ...]
    """The digest of every section of the federation file, by name."""
    signature: bytes = NO_SIGNATURE


@dataclass(frozen=True)
class JournalPosition:
    """The sender's position in the journal of each of its groups, in this view.

    Attributes:
        content: the report (`positions.PositionReport`), encoded; the same for all recipients.
        signature: the sender's signature over the content.
        tag: proves to the recipient that the ephemeral key is the sender's (`key_agreement.PairKeys`).
        contributions: the sender's contributions to the keys of the groups that the recipient is a member of.
        hellos: the ephemeral keys that the sender received, with their signatures, by member.
    """

    content: bytes
    signature: bytes
    tag: bytes = bytes(TAG_BYTES)
    contributions: tuple[tuple[str, bytes], ...] = ()
    hellos: tuple[tuple[PeerId, bytes, bytes], ...] = ()


@dataclass(frozen=True)
class PositionsGathered:
    """The sender has the first report of every member in this view; this is the digest of all of them."""

    digest: bytes


@dataclass(frozen=True)
class SignedEvidence:
    """The signed statements that the sender received; different contents prove that their signer equivocated.

    Attributes:
        kind: the kind of the statements.
        slot: the digest of their subject.
        statements: the digest of the content and the signature, by member.
    """

    kind: str
    slot: bytes
    statements: tuple[tuple[PeerId, bytes, bytes], ...]


@dataclass(frozen=True)
class JournalRequest:
    """A request for the entries of a group's journal from index `since` on, and for the optimiser states."""

    group: str
    since: int = 0
    states: bool = True


@dataclass(frozen=True)
class JournalChunk:
    """A slice of the requested journal entries, from byte `start` on; they have `size` bytes in total."""

    start: int
    group: str
    size: int
    words: Buffer


@dataclass(frozen=True)
class Goodbye:
    """The sender's program is done (or, if not `done`, was stopped); it stays until all programs are done.

    `ends` has the number of finished sums and the final digest of the journal, by group.
    """

    done: bool
    ends: tuple[tuple[str, int, bytes], ...] = ()


@dataclass(frozen=True)
class KeyShare:
    """The recipient's share of the sender's self-mask key, if there is a quorum."""

    share: bytes


@dataclass(frozen=True)
class Attendance:
    """Who is present, as the sender proposes it; a view is formed when all of `members` propose the same.

    Attributes:
        number: the number of the view; it increases.
        members: the members of the view; none if too few are present.
        processes: the digest of the ephemeral keys of these members.
        absent: the members that the sender has not heard for too long.
        begun: whether the sender has finished a sum in this epoch.
    """

    number: int
    members: tuple[PeerId, ...]
    processes: bytes
    absent: tuple[PeerId, ...]
    begun: bool


@dataclass(frozen=True)
class CompleteSum:
    """What the sender knows of a sum that was interrupted when it was opened (`completion.py`), encoded."""

    group: str
    content: bytes


Slice = Share | Subtotal | Total
SumMessage = Ready | Slice | KeyShare | Confirm | RevealKey | Abort | Leave
MembershipMessage = (
    Hello
    | JournalPosition
    | PositionsGathered
    | SignedEvidence
    | JournalRequest
    | JournalChunk
    | Goodbye
    | Attendance
    | CompleteSum
)
Message = SumMessage | MembershipMessage | Deposit | ResendRequest


Item = TypeVar("Item")


class Outbox(Generic[Item]):
    """Outgoing items with their recipients; the items of one recipient keep their order.

    Examples:
        >>> outbox = Outbox[str]()
        >>> outbox.put("a", "first")
        >>> outbox.put("b", "second")
        >>> outbox.pop(blocked={"a"})
        ('b', 'second')
        >>> outbox.pop(blocked={"a"})
        >>> outbox.pop()
        ('a', 'first')
    """

    def __init__(self) -> None:
        self._queue: deque[tuple[PeerId, Item]] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, to: PeerId, item: Item) -> None:
        """Append an item."""
        self._queue.append((to, item))

    def pop(self, blocked: Collection[PeerId] = ()) -> tuple[PeerId, Item] | None:
        """Remove and return the first item whose recipient is not blocked; return None if there is none."""
        for index, (to, item) in enumerate(self._queue):
            if to not in blocked:
                del self._queue[index]
                return to, item
        return None

    def discard(self, condition: Callable[[PeerId, Item], bool]) -> None:
        """Remove all items that meet a condition."""
        self._queue = deque((to, item) for to, item in self._queue if not condition(to, item))

    def clear(self) -> None:
        """Remove all items."""
        self._queue.clear()
