"""Reduction: cut the vector into parts, and add the members' subtotals to one masked total.

Every subtotal is masked with its member's self-mask, and so is the total. `MemberReduction` cuts the vector into parts,
and each part is added by one member, its reducer. In `HubReduction` the hub adds everything. The hub is not a member
and need not be trusted: each subtotal carries MAC tags (`mac.py`), and a total that does not match its tags is rejected
before any member confirms it.

`parts` decides which member reduces which part; `slices` cuts a part into messages.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from cgd.errors import HubError, InputError, LocalProtocolError, MembershipError, RemoteProtocolError
from cgd.secagg.fixed_point import WORD_TYPES
from cgd.secagg.mac import TAGS, LinearMac
from cgd.secagg.messages import HUB, MAX_NAME_BYTES, Deposit, Message, PeerId, Slice, Subtotal, SumSpec, Total

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    import numpy.typing as npt

    from cgd.secagg.masking import PairwiseMasks

    Send = Callable[[PeerId, Message], None]


MIN_MEMBERS = 3
# Elements in one message. Encrypted channels were fastest with a mebibyte of 32-bit words, and it is small enough to
# bound the memory for unrequested data.
SLICE_ELEMENTS = 1 << 18
MAX_SLICE_BYTES = SLICE_ELEMENTS * max(dtype.itemsize for dtype in WORD_TYPES.values())


def check_members(me: PeerId, members: Collection[PeerId]) -> None:
    """Check the members of a sum.

    Raises:
        MembershipError: there are fewer than 3 members, a name occurs twice, or `me` is not a member.
    """
    if len(members) < MIN_MEMBERS:
        raise MembershipError(
            f"{len(members)} member(s): the sum of two members reveals both addends; "
            f"a secure sum needs at least {MIN_MEMBERS}"
        )
    for name in members:
        if not name.isprintable() or not 1 <= len(name.encode()) <= MAX_NAME_BYTES:
            raise MembershipError(
                f"{name!r} is not a valid name; use 1 to {MAX_NAME_BYTES} bytes of printable characters"
            )
    if len(set(members)) != len(members):
        raise MembershipError(f"a member is named twice: {', '.join(sorted(members))}")
    if me not in members:
        raise MembershipError(f"{me} is not a member of this sum ({', '.join(sorted(members))})")


def check_secret(
    spec: SumSpec, secret: npt.NDArray[Any], me: PeerId, members: Collection[PeerId], masks: PairwiseMasks | None
) -> None:
    """Check that these members can sum this secret with these settings.

    Raises:
        LocalProtocolError: the secret is not encoded according to the settings, or pair keys are missing.
        InputError: the vector is empty, or the aggregator is not a member.
    """
    size, dtype = spec.size, WORD_TYPES[spec.ring_bits]
    if secret.shape != (size,) or secret.dtype != dtype:
        raise LocalProtocolError(
            f"the secret is {secret.dtype}{list(secret.shape)}, the settings require {dtype}{[size]}; encode it first"
        )
    if size == 0:
        raise InputError(f"a vector of shape {spec.shape} is empty; there is nothing to sum")
    known = masks.peers if masks is not None else frozenset()
    if spec.masking == "pairwise" and known != set(members) - {me}:
        raise LocalProtocolError(
            f"pairwise masking needs a pair key with every peer ({', '.join(members)}), "
            f"but there are keys with {', '.join(sorted(known)) or 'none of them'}"
        )
    if spec.opening == "aggregator" and spec.aggregator not in members:
        raise MembershipError(f"the aggregator {spec.aggregator!r} is not a member; name one of {', '.join(members)}")


def parts(spec: SumSpec, members: Collection[PeerId]) -> dict[PeerId, slice]:
    """Return the part of the flat vector that each member adds, without empty parts.

    Examples:
        >>> parts(SumSpec((5,), "float32", 32, 20, "uniform", "mesh"), ["a", "b", "c"])
        {'a': slice(0, 2, None), 'b': slice(2, 4, None), 'c': slice(4, 5, None)}
    """
    size = spec.size
    if spec.opening == "aggregator":
        return {spec.aggregator: slice(0, size)}
    length, longer = divmod(size, len(members))
    found = {}
    start = 0
    for i, member in enumerate(sorted(members)):
        stop = start + length + (i < longer)
        if stop > start:
            found[member] = slice(start, stop)
        start = stop
    return found


def slices(part: slice) -> list[slice]:
    """Cut a part into slices of at most `SLICE_ELEMENTS` elements, each sent in one message.

    Examples:
        >>> end = 5 + SLICE_ELEMENTS
        >>> slices(slice(5, end + 1)) == [slice(5, end), slice(end, end + 1)]
        True
    """
    return [slice_at(part, start) for start in range(part.start, part.stop, SLICE_ELEMENTS)]


def slice_at(part: slice, start: int) -> slice:
    """Return the slice of a part that starts at `start`, or an empty slice if there is none."""
    exists = start in range(part.start, part.stop, SLICE_ELEMENTS)
    return slice(start, min(start + SLICE_ELEMENTS, part.stop)) if exists else slice(0, 0)


# The number of slices that a member deposits before the hub has sent their totals; it bounds the hub's memory.
MAX_SLICES_AHEAD = 64


@dataclass(frozen=True)
class HubKeys:
    """The data that a group needs to sum through the hub.

    Attributes:
        group: the name of the group at the hub.
        key: 16 secret bytes that the members have and the hub does not.
    """

    group: str
    key: bytes = field(repr=False)


class Reduction(Protocol):
    """One member's side of the computation of the masked total."""

    def start(self, subtotal: npt.NDArray[Any]) -> None:
        """Send the first slice of each part of our masked subtotal."""

    def proceed(self) -> None:
        """Send everything else: all members are ready with the same settings."""

    def is_duplicate(self, sender: PeerId, message: Subtotal | Total) -> bool:
        """Return whether this slice was received before."""

    def receive(self, sender: PeerId, message: Subtotal | Total) -> None:
        """Process a slice."""

    def resend(self) -> None:
        """Send all deposits again, because the hub lost them."""

    @property
    def waiting_for(self) -> tuple[str, frozenset[PeerId]]:
        """The missing message, and the peers that have to send it; none when the total is complete."""

    def total(self) -> npt.NDArray[Any]:
        """Return the complete masked total."""

    def digest(self) -> bytes:
        """Return the SHA-256 digest of the complete masked total."""


class TotalDigest:
    """The SHA-256 digest of a total whose slices become complete in any order, taken as far as the first gap.

    Args:
        total: the total.
        parts: its slices; what is behind its end is left out.

    Examples:
        >>> total = np.arange(6, dtype=np.uint32)
        >>> digest = TotalDigest(total, [slice(0, 4), slice(4, 6)])
        >>> digest.add(4)
        >>> digest.add(0)
        >>> digest.digest() == sha256(total.data).digest()
        True
    """

    def __init__(self, total: npt.NDArray[Any], parts: Iterable[slice]) -> None:
        self._total, self._sha = total, sha256()
        self._next = deque(sorted(parts, key=lambda part: part.start))
        self._complete: set[int] = set()

    def add(self, start: int) -> None:
        """Record that the slice with this start is complete, and does not change any more."""
        self._complete.add(start)
        while self._next and self._next[0].start in self._complete:
            self._sha.update(self._total[self._next.popleft()].data)

    def digest(self) -> bytes:
        """Return the digest; all slices are complete."""
        assert not self._next  # noqa: S101 - the caller has checked it
        return self._sha.digest()


class MemberReduction:
    """A reduction in which each part of the vector is added by one member, which sends it to all; see `Reduction`."""

    def __init__(
        self, me: PeerId, members: Collection[PeerId], spec: SumSpec, dtype: np.dtype[Any], send: Send
    ) -> None:
        self._me = me
        self._others = [peer for peer in members if peer != me]
        self._send = send
        self._parts = parts(spec, members)
        self._slices = {member: slices(self._parts.get(member, slice(0, 0))) for member in members}
        self._total = np.zeros(spec.size, dtype=dtype)
        self._digest = TotalDigest(self._total, chain.from_iterable(self._slices.values()))
        # The starts of the received slices: of our part (Subtotal), and of the parts of others (Total).
        self._received: dict[type[Slice], dict[PeerId, set[int]]] = {
            kind: {peer: set() for peer in self._others} for kind in (Subtotal, Total)
        }
        self._reduced: int | None = None  # slices of our part whose totals were sent; None before `proceed`

    def start(self, subtotal: npt.NDArray[Any]) -> None:
        """Send every reducer the first slice of its part."""
        self._subtotal = subtotal
        self._send_slices({reducer: found[:1] for reducer, found in self._slices.items()})

    def proceed(self) -> None:
        """Send every reducer the rest of its part: the second slice of each part, then the third of each."""
        self._send_slices({reducer: found[1:] for reducer, found in self._slices.items()})
        self._reduced = 0
        self._send_totals()

    def is_duplicate(self, sender: PeerId, message: Subtotal | Total) -> bool:
        """Return whether this slice was received before."""
        return message.start in self._received[type(message)][sender]

    def receive(self, sender: PeerId, message: Subtotal | Total) -> None:
        """Add a slice to the total."""
        if isinstance(message, Subtotal) and self._me not in self._parts:
            raise RemoteProtocolError(sender, "sent a Subtotal to this member, which adds no part of this sum")
        if isinstance(message, Total) and sender not in self._parts:
            raise RemoteProtocolError(sender, "sent a Total, but it adds no part of this sum")
        part = self._parts[self._me if isinstance(message, Subtotal) else sender]
        add_slice(sender, message, part, self._total)
        self._received[type(message)][sender].add(message.start)
        if isinstance(message, Total):
            self._digest.add(message.start)
        self._send_totals()

    def resend(self) -> None:
        """Do nothing: the hub takes no part."""

    @property
    def waiting_for(self) -> tuple[str, frozenset[PeerId]]:
        """The missing message, and the peers that have not sent all slices of it."""
        if (self._reduced or 0) < len(self._slices[self._me]):
            received, count = self._received[Subtotal], len(self._slices[self._me])
            return "Subtotal", frozenset(peer for peer in self._others if len(received[peer]) < count)
        received = self._received[Total]
        return "Total", frozenset(peer for peer in self._others if len(received[peer]) < len(self._slices[peer]))

    def total(self) -> npt.NDArray[Any]:
        """Return the masked total."""
        return self._total

    def digest(self) -> bytes:
        """Return the SHA-256 digest of the masked total."""
        return self._digest.digest()

    def _send_slices(self, found: dict[PeerId, list[slice]]) -> None:
        for row in zip_longest(*found.values()):
            for reducer, part in zip(found, row, strict=True):
                if part is None:
                    continue
                if reducer == self._me:
                    np.add(self._total[part], self._subtotal[part], out=self._total[part])
                else:
                    self._send(reducer, Subtotal(part.start, as_bytes(self._subtotal[part])))

    def _send_totals(self) -> None:
        """Send the total of every slice of our part that was received from all peers."""
        if self._reduced is None:
            return
        for part in self._slices[self._me][self._reduced :]:
            if not all(part.start in received for received in self._received[Subtotal].values()):
                return
            for peer in self._others:
                self._send(peer, Total(part.start, as_bytes(self._total[part])))
            self._digest.add(part.start)
            self._reduced += 1


class HubReduction:
    """A reduction in which the hub adds everything, verified by a MAC; see `Reduction`."""

    def __init__(
        self,
        me: PeerId,
        members: Collection[PeerId],
        number: int,
        spec: SumSpec,
        dtype: np.dtype[Any],
        hub: HubKeys,
        send: Send,
    ) -> None:
        self._me, self._number, self._spec, self._hub, self._send = me, number, spec, hub, send
        self._mac = LinearMac(hub.key, number, members)
        self._whole = slice(0, spec.size + TAGS)
        self._slices = slices(self._whole)
        self._total = np.zeros(self._whole.stop, dtype=dtype)
        self._digest = TotalDigest(self._total[: spec.size], self._slices)
        self._subtotal: npt.NDArray[Any] | None = None
        self._received: set[int] = set()
        self._sent_by_hub: set[int] = set()  # the received slices that the present incarnation of the hub has sent
        self._deposited = 0
        self._all_ready = False

    def start(self, subtotal: npt.NDArray[Any]) -> None:
        """Deposit the first slice of our subtotal with its MAC tags."""
        self._subtotal = subtotal
        self._tags = self._mac.tags(self._me, subtotal)
        self._deposit()

    def proceed(self) -> None:
        """Deposit the other slices."""
        self._all_ready = True
        self._deposit()

    def is_duplicate(self, sender: PeerId, message: Subtotal | Total) -> bool:
        """Return whether this slice was received before; continue to deposit if a restarted hub sent it first now."""
        if sender != HUB or message.start not in self._received:
            return False
        self._sent_by_hub.add(message.start)
        self._deposit()
        return True

    def receive(self, sender: PeerId, message: Subtotal | Total) -> None:
        """Store a slice of the total."""
        if sender != HUB:
            raise RemoteProtocolError(sender, f"sent a {type(message).__name__}, but the hub adds this sum")
        add_slice(sender, message, self._whole, self._total)
        self._digest.add(message.start)
        self._received.add(message.start)
        self._sent_by_hub.add(message.start)
        self._deposit()

    def resend(self) -> None:
        """Deposit everything again: the same bytes, so the hub learns nothing from it."""
        self._sent_by_hub.clear()
        self._deposited = 0
        self._deposit()

    @property
    def waiting_for(self) -> tuple[str, frozenset[PeerId]]:
        """The missing message, and the hub until the total is complete."""
        return "Total", frozenset({HUB} if len(self._received) < len(self._slices) else ())

    def total(self) -> npt.NDArray[Any]:
        """Return the masked total.

        Raises:
            HubError: it is not the sum of the members' subtotals.
        """
        if not self._mac.verify(self._total):
            raise HubError(
                f"the total of sum {self._number} does not match its MAC tags: the hub added wrongly or altered the "
                "deposits, or a member deposited wrong tags; no total was revealed"
            )
        return self._total[: self._spec.size]

    def digest(self) -> bytes:
        """Return the SHA-256 digest of the masked total."""
        return self._digest.digest()

    def _deposit(self) -> None:
        """Deposit the next slices, at most `MAX_SLICES_AHEAD` ahead of the totals that the hub has sent."""
        if self._subtotal is None:
            return
        limit = len(self._sent_by_hub) + MAX_SLICES_AHEAD if self._all_ready else 1
        while self._deposited < min(limit, len(self._slices)):
            part = self._slices[self._deposited]
            size = self._subtotal.size
            words = self._subtotal[part]
            if part.stop > size:  # the tags are at the end, and may be a slice of their own
                words = np.concatenate([words, self._tags[max(0, part.start - size) : part.stop - size]])
            self._send(HUB, Deposit(part.start, self._hub.group, self._spec.ring_bits, as_bytes(words)))
            self._deposited += 1


def add_slice(sender: PeerId, message: Slice, part: slice, to: npt.NDArray[Any]) -> None:
    """Add a slice of a part to the vector `to`; store a slice of a total.

    Raises:
        RemoteProtocolError: it is not a slice of that part.
    """
    target = to[slice_at(part, message.start)]
    if len(message.words) != target.nbytes or not target.size:
        raise RemoteProtocolError(
            sender,
            f"sent a {type(message).__name__} of {len(message.words)} bytes from element {message.start} on, "
            f"not {target.nbytes}",
        )
    words = np.frombuffer(message.words, dtype=to.dtype)
    if isinstance(message, Total):  # received once, into zeros
        np.copyto(target, words)
    else:
        np.add(target, words, out=target)


def as_bytes(words: npt.NDArray[Any]) -> memoryview:
    """Return ring elements as the bytes to send."""
    return words.data.cast("B")
