"""A link carries one process's frames to another, whole, once and in order, over a channel that may lose some.

Connections break and come back, and what was on the way is gone. So frames are numbered, kept until the other side has
consumed them, and sent again if they got lost. No I/O here: datagrams in, datagrams out, and the time is told by
whoever drives it. The rules:

1. Every process has an incarnation: 8 random bytes, made when it starts. Every datagram names the sender's and, once it
   is known, the recipient's. What is meant for or comes from another incarnation is stale and dropped, so that nothing
   is replayed from one life of a process into the next.
2. `Outgoing` says HELLO until it is welcomed. A WELCOME from a new incarnation starts the numbers anew, with whatever
   had not been consumed by the one before.
3. The channel keeps the order of what it does not lose. So when the other side tells that it lacks a frame sent before
   one it has seen (or before a PING it has seen), that frame is lost, and everything from there on is sent again.
4. At most `WINDOW` bytes are under way, or one frame. They count until the other side has consumed them. The other side
   drops what is beyond that, and what is beyond `MAX_UNREAD_BYTES` frames, so that nobody can fill its memory.
5. A second process with the same key is not let in while the first one answers: see `Incoming`.

    offset  bytes  field
    0       4      "CGDL"
    4       1      version
    5       1      kind
    6       2      zero
    8       8      incarnation of the sender
    16      8      incarnation of the recipient, zero if not known
    24      8      a number: which, the kind says
    32      …      body
"""

from __future__ import annotations

import os
import struct
from collections import deque
from dataclasses import dataclass
from enum import IntEnum
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cgd.secagg.messages import Buffer


VERSION = 1
INCARNATION_BYTES = 8
NOBODY = bytes(INCARNATION_BYTES)
WINDOW = 8 << 20
MAX_FRAME_BYTES = 4 << 20
MAX_UNREAD_BYTES = 1 << 16
MAX_DATAGRAM_NUMBER = 2**63
HELLO_SECONDS = 0.25
BUSY_PING_SECONDS = 0.25
IDLE_PING_SECONDS = 1.0
SILENT_SECONDS = 4.0
_MAGIC = b"CGDL"
_HEADER = struct.Struct("<4sBB2x8s8sQ")
_COUNTS = struct.Struct("<QQ")
HEADER_BYTES = _HEADER.size


class DatagramKind(IntEnum):
    """What a datagram is for; in brackets, its number. The first three are what a sending end says."""

    HELLO = 1  # I begin to send to you; the body is my name
    DATA = 2  # a frame (its place in the order)
    PING = 3  # are you there? (the place of the next frame to come)
    WELCOME = 4  # I take what you send (the place I expect next)
    ACK = 5  # how many were consumed; the body: how many have arrived, and how many are known to be sent
    PROBE = 6  # is this still you? answer with a PING
    STALE = 7  # I do not know you: begin with HELLO
    REFUSED = 8  # I do not take what you send; the body says why

    @property
    def from_sender(self) -> bool:
        """Whether a sending end says it."""
        return self in (DatagramKind.HELLO, DatagramKind.DATA, DatagramKind.PING)


@dataclass(frozen=True)
class Datagram:
    """One message of a link."""

    kind: DatagramKind
    sender: bytes
    recipient: bytes
    number: int = 0
    body: Buffer = b""

    def to_bytes(self) -> bytes:
        """The datagram as it travels."""
        return b"".join((_HEADER.pack(_MAGIC, VERSION, self.kind, self.sender, self.recipient, self.number), self.body))


class DatagramError(ValueError):
    """These bytes are not a datagram of ours."""


def from_bytes(data: Buffer) -> Datagram:
    """Read a datagram.

    Raises:
        DatagramError: it is none; it says why.
    """
    if len(data) < HEADER_BYTES:
        raise DatagramError(f"truncated: {len(data)} bytes, the header alone has {HEADER_BYTES}")
    if len(data) > HEADER_BYTES + MAX_FRAME_BYTES:
        raise DatagramError(f"oversized: {len(data)} bytes, at most {HEADER_BYTES + MAX_FRAME_BYTES}")
    magic, version, kind, sender, recipient, number = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise DatagramError("malformed: not a datagram of cgd")
    if version != VERSION:
        raise DatagramError(f"version {version} of the link, we speak {VERSION}; install the same cgd")
    if not 1 <= kind <= len(DatagramKind):
        raise DatagramError(f"malformed: unknown kind {kind}")
    if number > MAX_DATAGRAM_NUMBER:  # nobody gets there by counting, and what we add to it still has to fit
        raise DatagramError(f"malformed: the number {number}")
    return Datagram(DatagramKind(kind), sender, recipient, number, memoryview(data)[HEADER_BYTES:])


class Outgoing:
    """The sending end of a link.

    Args:
        me: our incarnation.
        hello: what to say in HELLO: our name.

    Attributes:
        latency: the seconds from the last PING to its answer; None while there is none.
        refusal: why the other side does not let us in, if it said so.
    """

    def __init__(self, me: bytes, hello: bytes) -> None:
        self.latency: float | None = None
        self.refusal: str | None = None
        self.heard = -inf
        self._me = me
        self._hello = hello
        self._them = NOBODY
        self._last = NOBODY  # whose numbers we count in
        self._frames: deque[bytes] = deque()  # what is not known to be consumed
        self._bytes = 0
        self._first = 0  # the place of the first of them
        self._next = 0  # the place of the first that was not sent
        self._spoke = -inf
        self._pinged: tuple[int, float] | None = None

    def offer(self, frame: bytes) -> bool:
        """Take a frame to send; False while there is no room."""
        if self._frames and self._bytes + len(frame) > WINDOW:
            return False
        self._frames.append(frame)
        self._bytes += len(frame)
        return True

    @property
    def waiting(self) -> int:
        """How many frames are not known to be consumed."""
        return len(self._frames)

    @property
    def welcomed(self) -> bool:
        """Whether the other side takes what we send."""
        return self._them != NOBODY

    def next_datagram(self, now: float) -> Datagram | None:
        """What to send now, if anything."""
        if not self.welcomed:
            if now - self._spoke < HELLO_SECONDS:
                return None
            self._spoke = now
            return Datagram(DatagramKind.HELLO, self._me, NOBODY, 0, self._hello)
        place = self._next - self._first
        if place < len(self._frames):
            self._next += 1
            return Datagram(DatagramKind.DATA, self._me, self._them, self._next - 1, self._frames[place])
        if now - self._spoke < (BUSY_PING_SECONDS if self._frames else IDLE_PING_SECONDS):
            return None
        return self._ping(now)

    def restart(self) -> None:
        """Begin anew: the process that has welcomed us is gone."""
        self._them = NOBODY
        self.hurry()

    def hurry(self) -> None:
        """Say something at once, by a new connection."""
        self._spoke = -inf

    def rest(self, now: float) -> float:
        """How many seconds there will be nothing to send, if nothing comes in."""
        if self.welcomed and self._next - self._first < len(self._frames):
            return 0.0
        pause = HELLO_SECONDS if not self.welcomed else BUSY_PING_SECONDS if self._frames else IDLE_PING_SECONDS
        return max(0.0, self._spoke + pause - now)

    def take(self, datagram: Datagram, now: float) -> Datagram | None:
        """Take in what the receiving end says; returns an answer if it asks for one."""
        if datagram.recipient != self._me:
            return None
        match datagram.kind:
            case DatagramKind.WELCOME:
                self._welcome(datagram)
            case DatagramKind.REFUSED:
                text = bytes(datagram.body[:500]).decode(errors="replace")
                self.refusal = "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)
                return None
            case DatagramKind.ACK if datagram.sender == self._them and len(datagram.body) == _COUNTS.size:
                self._acknowledge(datagram, now)
            case DatagramKind.STALE:
                self._them = NOBODY
                return None
            case DatagramKind.PROBE if datagram.sender == self._them:
                return self._ping(now)
            case _:
                return None
        self.heard = now
        return None

    def _welcome(self, datagram: Datagram) -> None:
        self.refusal = None
        if self.welcomed:
            return
        self._them = datagram.sender
        if datagram.sender != self._last:  # a new life: whatever the one before did not consume is for this one
            self._last = datagram.sender
            self._first = datagram.number
        self._next = max(self._first, datagram.number)

    def _acknowledge(self, datagram: Datagram, now: float) -> None:
        arrived, seen = _COUNTS.unpack(datagram.body)
        if not self._first <= datagram.number <= arrived <= self._first + len(self._frames):
            return
        if self._pinged is not None and seen == self._pinged[0]:
            self.latency = now - self._pinged[1]
            self._pinged = None
        while self._first < datagram.number:
            self._bytes -= len(self._frames.popleft())
            self._first += 1
        self._next = arrived if seen > arrived else max(self._next, self._first)

    def _ping(self, now: float) -> Datagram:
        self._spoke = now
        self._pinged = (self._next, now)
        return Datagram(DatagramKind.PING, self._me, self._them, self._next)


class Incoming:
    """The receiving end of a link, for one peer; it may hear from several processes that have the peer's key.

    One of them is let in. Another is let in when the first no longer answers: its channel is gone, or it does not
    answer a PROBE in time. So whoever has a copy of the key and talks nonsense cannot push the participant out.

    Args:
        me: our incarnation.
    """

    def __init__(self, me: bytes) -> None:
        self.heard = -inf
        self.channel: bytes | None = None
        self.stale = 0
        """Datagrams that were dropped: of another incarnation, copies, or beyond the window."""
        self.life = 0
        """Counts the incarnations of the peer that were let in."""
        self._me = me
        self._them = NOBODY
        self._arrived = 0  # the place expected next
        self._consumed = 0
        self._consumed_bytes = 0
        self._unread = 0
        self._unread_bytes = 0
        self._gap_told = -1
        self._probed: float | None = None
        self._asked = -inf
        self._asking = False

    def hello(self, datagram: Datagram, channel: bytes, now: float) -> Datagram:
        """Somebody with the peer's key wants in, on this channel; what to answer there."""
        if datagram.sender != self._them:
            if self.alive(now):
                self._probed = now if self._probed is None else self._probed
                if now - self._asked >= HELLO_SECONDS:
                    self._asked, self._asking = now, True
                return self._answer(
                    DatagramKind.REFUSED, datagram, b"another process with this key is connected; stop it first"
                )
            self._them = datagram.sender
            self._me = os.urandom(INCARNATION_BYTES)  # numbers begin anew, and the sender knows it by this
            self.life += 1
            self._arrived = self._consumed = self._consumed_bytes = 0
            self._gap_told = -1
        self.channel, self.heard, self._probed = channel, now, None
        return self._answer(DatagramKind.WELCOME, datagram)

    def probe(self) -> Datagram | None:
        """Ask the one who is in whether it is still there, if somebody else wants in; once for many who do."""
        if not self._asking or self._probed is None:
            return None
        self._asking = False
        return Datagram(DatagramKind.PROBE, self._me, self._them)

    def gone(self) -> None:
        """The channel of the one who is in does not exist any more."""
        self.heard = -inf

    def alive(self, now: float) -> bool:
        """Whether the process that is in was heard lately; less time if it was asked."""
        if self._them == NOBODY:
            return False
        patience = SILENT_SECONDS if self._probed is None else SILENT_SECONDS / 2
        return now - self.heard < patience

    def take(self, datagram: Datagram, channel: bytes, now: float) -> tuple[Buffer | None, Datagram | None]:
        """Take in DATA or PING: the frame, if it is the next one, and an answer, if one is due."""
        if datagram.sender != self._them or datagram.recipient != self._me:
            self.stale += 1
            return None, self._answer(DatagramKind.STALE, datagram) if datagram.kind is DatagramKind.PING else None
        self.channel, self.heard, self._probed = channel, now, None
        if datagram.kind is DatagramKind.PING:
            return None, self._ack(datagram.number)
        if datagram.number == self._arrived and self._room(len(datagram.body)):
            self._arrived += 1
            self._unread += 1
            self._unread_bytes += len(datagram.body)
            self._gap_told = -1
            return datagram.body, None
        self.stale += 1
        if datagram.number > self._arrived and self._gap_told != self._arrived:
            self._gap_told = self._arrived
            return None, self._ack(datagram.number + 1)
        return None, None

    def _room(self, nbytes: int) -> bool:
        return self._unread == 0 or (self._unread < MAX_UNREAD_BYTES and self._unread_bytes + nbytes <= WINDOW)

    def consumed(self, nbytes: int, life: int | None = None) -> Datagram | None:
        """A frame was read, of the present life of the peer if not told; an answer if the sender should know now."""
        self._unread -= 1
        self._unread_bytes -= nbytes
        if life is not None and life != self.life:  # the one who sent it is gone, and the numbers began anew
            return None
        self._consumed += 1
        self._consumed_bytes += nbytes
        return self._ack(self._consumed) if self._consumed_bytes > WINDOW // 4 else None

    def _ack(self, seen: int) -> Datagram:
        self._consumed_bytes = 0
        return Datagram(DatagramKind.ACK, self._me, self._them, self._consumed, _COUNTS.pack(self._arrived, seen))

    def _answer(self, kind: DatagramKind, datagram: Datagram, body: bytes = b"") -> Datagram:
        return Datagram(kind, self._me, datagram.sender, self._arrived, body)
