"""A link delivers the frames of one process to another, once and in order, over connections that may lose datagrams.

When a connection breaks, datagrams that were in flight are lost. So frames are numbered, kept until the other side has
consumed them, and retransmitted if they were lost. No I/O here: datagrams in, datagrams out; the caller supplies the
time. The rules:

1. Every process has an incarnation: 8 random bytes, drawn when it starts. Every datagram carries the incarnation of its
   sender and, once known, of its recipient. Datagrams to or from another incarnation are stale and dropped, so that
   nothing from before a restart is replayed after it.
2. `OutboundLink` sends HELLO until it receives WELCOME. A WELCOME from a new incarnation restarts the numbering, with
   the frames that the previous one had not consumed.
3. A connection keeps the order of the datagrams that it does not lose. So when the other side reports that it lacks a
   frame that was sent before one it has received (or before a PING it has received), that frame is lost, and
   everything from there on is sent again.
4. At most `WINDOW_BYTES` are in flight, or one frame. They count until the other side has consumed them. The other side
   drops what exceeds that, or `MAX_UNREAD_FRAMES` frames, so that no sender can fill its memory.
5. A second process with the same key is rejected while the first one responds: see `InboundLink`.

    offset  bytes  field
    0       4      "CGDL"
    4       1      version
    5       1      kind
    6       2      zero
    8       8      incarnation of the sender
    16      8      incarnation of the recipient, zero if not known
    24      8      a number; its meaning depends on the kind
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

from cgd.secagg.buffers import pool
from cgd.transport.base import MAX_FRAME_BYTES

if TYPE_CHECKING:
    from cgd.secagg.messages import Buffer


VERSION = 1
INCARNATION_BYTES = 8
NO_INCARNATION = bytes(INCARNATION_BYTES)
WINDOW_BYTES = 8 << 20
MAX_UNREAD_FRAMES = 1 << 16
MAX_DATAGRAM_NUMBER = 2**63
MAX_REASON_BYTES = 500
HELLO_SECONDS = 0.25
BUSY_PING_SECONDS = 0.25
IDLE_PING_SECONDS = 1.0
SILENT_SECONDS = 4.0
ASKING = b"asking whether an earlier process with this key still runs"
SECOND_PROCESS = b"another process with this key is connected; stop it first"
_MAGIC = b"CGDL"
_HEADER = struct.Struct("<4sBB2x8s8sQ")
_COUNTS = struct.Struct("<QQ")
HEADER_BYTES = _HEADER.size


class DatagramKind(IntEnum):
    """The kinds of datagrams; in brackets the meaning of the number. An outbound link sends the first three."""

    HELLO = 1  # start of a link; the body has the name and the address of the sender
    DATA = 2  # a frame (its number)
    PING = 3  # request for an ACK (the number of the next frame)
    WELCOME = 4  # answer to HELLO: the link is accepted (the number of the frame expected next)
    ACK = 5  # (the count of consumed frames); the body: the counts of frames received, and of frames known to be sent
    PROBE = 6  # request for a PING
    STALE = 7  # the sender's incarnation is not known: it must start with HELLO
    REJECTED = 8  # answer to HELLO: the link is rejected; the body has the reason

    @property
    def from_sender(self) -> bool:
        """True for the kinds that an outbound link sends."""
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
        """Serialise the datagram as one object; `encode` costs less."""
        return bytes(self.encode())

    def encode(self) -> Buffer:
        """Serialise the datagram; the header of a large frame is put before it in its buffer."""
        return pool.join(_HEADER.pack(_MAGIC, VERSION, self.kind, self.sender, self.recipient, self.number), self.body)


class DatagramError(ValueError):
    """The bytes are not a valid datagram."""


def from_bytes(data: Buffer) -> Datagram:
    """Parse a datagram.

    Raises:
        DatagramError: the bytes are not a valid datagram; the message has the reason.
    """
    if len(data) < HEADER_BYTES:
        raise DatagramError(f"truncated: {len(data)} bytes, the header alone has {HEADER_BYTES}")
    if len(data) > HEADER_BYTES + MAX_FRAME_BYTES:
        raise DatagramError(f"oversized: {len(data)} bytes, at most {HEADER_BYTES + MAX_FRAME_BYTES}")
    magic, version, kind, sender, recipient, number = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise DatagramError("malformed: not a datagram of cgd")
    if version != VERSION:
        raise DatagramError(f"version {version} of the link, ours is {VERSION}; install the same cgd")
    if not 1 <= kind <= len(DatagramKind):
        raise DatagramError(f"malformed: unknown kind {kind}")
    if number > MAX_DATAGRAM_NUMBER:  # no honest sender counts that far, and sums with it must still fit
        raise DatagramError(f"malformed: the number {number}")
    return Datagram(DatagramKind(kind), sender, recipient, number, memoryview(data)[HEADER_BYTES:])


class OutboundLink:
    """The sending end of a link.

    Args:
        incarnation: the incarnation of this process.
        hello: the body of HELLO: the name and the address of this participant.

    Attributes:
        latency: the seconds from the last PING to its answer; None before the first answer.
        rejection: the reason for which the other side rejects the link, or None.
        last_received: the time of the last answer.
        established_at: the time at which the other side accepted the link.
    """

    def __init__(self, incarnation: bytes, hello: bytes) -> None:
        self.latency: float | None = None
        self.rejection: str | None = None
        self.last_received = self.established_at = -inf
        self._incarnation = incarnation
        self._hello = hello
        self._peer = NO_INCARNATION
        self._numbered_for = NO_INCARNATION  # the incarnation of the peer that the current numbers belong to
        self._frames: deque[Buffer] = deque()  # frames that are not known to be consumed
        self._bytes = 0
        self._first_number = 0  # of `_frames`
        self._next_number = 0  # of the first frame that was not sent yet
        self._last_sent = -inf  # the time of the last HELLO or PING
        self._pending_ping: tuple[int, float] | None = None

    def enqueue(self, frame: Buffer) -> bool:
        """Accept a frame for sending; return False if the window is full."""
        if self._frames and self._bytes + len(frame) > WINDOW_BYTES:
            return False
        self._frames.append(frame)
        self._bytes += len(frame)
        return True

    @property
    def unconsumed(self) -> int:
        """The number of frames that are not known to be consumed."""
        return len(self._frames)

    @property
    def has_unsent_frames(self) -> bool:
        """True if a frame was not sent yet."""
        return self._next_number - self._first_number < len(self._frames)

    @property
    def established(self) -> bool:
        """True if the other side has accepted the link."""
        return self._peer != NO_INCARNATION

    def next_datagram(self, now: float) -> Datagram | None:
        """Return the next datagram to send, or None."""
        if not self.established:
            if now - self._last_sent < HELLO_SECONDS:
                return None
            self._last_sent = now
            return Datagram(DatagramKind.HELLO, self._incarnation, NO_INCARNATION, 0, self._hello)
        index = self._next_number - self._first_number
        if index < len(self._frames):
            self._next_number += 1
            return Datagram(
                DatagramKind.DATA, self._incarnation, self._peer, self._next_number - 1, self._frames[index]
            )
        if now - self._last_sent < (BUSY_PING_SECONDS if self._frames else IDLE_PING_SECONDS):
            return None
        return self._ping(now)

    def restart(self) -> None:
        """Start again with HELLO: the process that accepted the link has ended."""
        self._peer = NO_INCARNATION
        self.expire_timer()

    def expire_timer(self) -> None:
        """Make the next HELLO or PING due now, because there is a new connection."""
        self._last_sent = -inf

    def idle_seconds(self, now: float) -> float:
        """Return the seconds until the next datagram is due, if nothing is received meanwhile."""
        if self.established and self.has_unsent_frames:
            return 0.0
        pause = HELLO_SECONDS if not self.established else BUSY_PING_SECONDS if self._frames else IDLE_PING_SECONDS
        return max(0.0, self._last_sent + pause - now)

    def receive(self, datagram: Datagram, now: float) -> Datagram | None:
        """Process a datagram of the receiving end; return the answer if one is due."""
        if datagram.recipient != self._incarnation:
            return None
        match datagram.kind:
            case DatagramKind.WELCOME:
                self._on_welcome(datagram, now)
            case DatagramKind.REJECTED:
                text = bytes(datagram.body[:MAX_REASON_BYTES]).decode(errors="replace")
                self.rejection = "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)
                return None
            case DatagramKind.ACK if datagram.sender == self._peer and len(datagram.body) == _COUNTS.size:
                self._on_ack(datagram, now)
            case DatagramKind.STALE:
                self._peer = NO_INCARNATION
                return None
            case DatagramKind.PROBE if datagram.sender == self._peer:
                return self._ping(now)
            case _:
                return None
        self.last_received = now
        return None

    def _on_welcome(self, datagram: Datagram, now: float) -> None:
        self.rejection = None
        if self.established:
            return
        self._peer, self.established_at = datagram.sender, now
        if datagram.sender != self._numbered_for:  # a new process: it gets what the previous one did not consume
            self._numbered_for = datagram.sender
            self._first_number = datagram.number
        self._next_number = max(self._first_number, datagram.number)

    def _on_ack(self, datagram: Datagram, now: float) -> None:
        received, sent = _COUNTS.unpack(datagram.body)
        if not self._first_number <= datagram.number <= received <= self._first_number + len(self._frames):
            return
        if self._pending_ping is not None and sent == self._pending_ping[0]:
            self.latency = now - self._pending_ping[1]
            self._pending_ping = None
        while self._first_number < datagram.number:
            self._bytes -= len(self._frames.popleft())
            self._first_number += 1
        self._next_number = received if sent > received else max(self._next_number, self._first_number)

    def _ping(self, now: float) -> Datagram:
        self._last_sent = now
        self._pending_ping = (self._next_number, now)
        return Datagram(DatagramKind.PING, self._incarnation, self._peer, self._next_number)


class InboundLink:
    """The receiving end of a link with one peer; several processes with the peer's key may send to it.

    One of them is accepted. Another one replaces it when the first stops responding: its connection is lost, or it does
    not answer a PROBE in time. So a process with a copied key cannot displace the participant by sending garbage.

    A restarted participant looks like a second process until it is clear that the killed one does not answer. So a
    process counts as refused only when the accepted one has answered with a PING; DATA may have been sent before.

    Args:
        incarnation: the incarnation of this process.

    Attributes:
        last_received: the time of the last datagram of the accepted process.
        reply_to: the return path to the accepted process; see `Route`.
        dropped: the number of datagrams dropped: stale, repeated, or beyond the window.
        generation: the number of incarnations of the peer that were accepted so far.
        refused: the number of HELLOs of other processes that were rejected, and after which the accepted one answered.
    """

    def __init__(self, incarnation: bytes) -> None:
        self.last_received = -inf
        self.reply_to: bytes | None = None
        self.dropped = 0
        self.generation = self.refused = 0
        self._incarnation = incarnation
        self._peer = NO_INCARNATION
        self._received = 0  # the number of the frame that is expected next
        self._consumed = 0
        self._unreported_bytes = 0  # consumed since the last ACK
        self._unread_frames = 0
        self._unread_bytes = 0
        self._reported_gap = -1
        self._lost = False  # the connection of the accepted process
        self._challenged = False  # another process has sent HELLO since the last datagram of the accepted one
        self._rejected = 0  # HELLOs of other processes since the last PING of the accepted one
        self._last_rejected = self._last_refused = NO_INCARNATION  # the last other process, before and after that PING
        self._last_probe = -inf
        self._probe_due = False

    def on_hello(self, datagram: Datagram, reply_to: bytes, now: float) -> Datagram:
        """Accept or reject a process that has the peer's key; return the answer."""
        if datagram.sender != self._peer:
            if self.is_alive(now):
                self._challenged = True
                if now - self._last_probe >= HELLO_SECONDS:
                    self._last_probe, self._probe_due = now, True
                self._rejected, self._last_rejected = self._rejected + 1, datagram.sender
                reason = SECOND_PROCESS if datagram.sender == self._last_refused else ASKING
                return self._answer(DatagramKind.REJECTED, datagram, reason)
            self._peer, self._rejected, self._last_refused = datagram.sender, 0, NO_INCARNATION
            self._incarnation = os.urandom(INCARNATION_BYTES)  # tells the sender that the numbering restarts
            self.generation += 1
            self._received = self._consumed = self._unreported_bytes = 0
            self._reported_gap = -1
        self._mark_received(reply_to, now)
        return self._answer(DatagramKind.WELCOME, datagram)

    def next_probe(self) -> Datagram | None:
        """Return a PROBE for the accepted process if another one wants to replace it; one for many attempts."""
        if not self._probe_due or not self._challenged:
            return None
        self._probe_due = False
        return Datagram(DatagramKind.PROBE, self._incarnation, self._peer)

    def mark_lost(self) -> None:
        """Record that the connection of the accepted process is lost."""
        self._lost = True

    def is_alive(self, now: float) -> bool:
        """Return whether the accepted process has sent something lately; it has less time after a PROBE."""
        if self._lost or self._peer == NO_INCARNATION:
            return False
        timeout = SILENT_SECONDS / 2 if self._challenged else SILENT_SECONDS
        return now - self.last_received < timeout

    def receive(self, datagram: Datagram, reply_to: bytes, now: float) -> tuple[Buffer | None, Datagram | None]:
        """Process DATA or PING; return the frame, if it is the next one, and the answer, if one is due."""
        if datagram.sender != self._peer or datagram.recipient != self._incarnation:
            self.dropped += 1
            return None, self._answer(DatagramKind.STALE, datagram) if datagram.kind is DatagramKind.PING else None
        self._mark_received(reply_to, now)
        if datagram.kind is DatagramKind.PING:
            if self._rejected:
                self.refused += self._rejected
                self._rejected, self._last_refused = 0, self._last_rejected
            return None, self._ack(datagram.number)
        if datagram.number == self._received and self._has_room(len(datagram.body)):
            self._received += 1
            self._unread_frames += 1
            self._unread_bytes += len(datagram.body)
            self._reported_gap = -1
            return datagram.body, None
        self.dropped += 1
        if datagram.number > self._received and self._reported_gap != self._received:
            self._reported_gap = self._received
            return None, self._ack(datagram.number + 1)
        return None, None

    def _mark_received(self, reply_to: bytes, now: float) -> None:
        self.reply_to, self.last_received, self._lost, self._challenged = reply_to, now, False, False

    def _has_room(self, nbytes: int) -> bool:
        return self._unread_frames == 0 or (
            self._unread_frames < MAX_UNREAD_FRAMES and self._unread_bytes + nbytes <= WINDOW_BYTES
        )

    def mark_consumed(self, nbytes: int, generation: int | None = None) -> Datagram | None:
        """Record that a frame of a generation (default: the current one) was read; return an ACK if one is due."""
        self._unread_frames -= 1
        self._unread_bytes -= nbytes
        if generation is not None and generation != self.generation:  # its sender has ended, the numbering restarted
            return None
        self._consumed += 1
        self._unreported_bytes += nbytes
        return self._ack(self._consumed) if self._unreported_bytes > WINDOW_BYTES // 4 else None

    def _ack(self, sent: int) -> Datagram:
        self._unreported_bytes = 0
        return Datagram(
            DatagramKind.ACK, self._incarnation, self._peer, self._consumed, _COUNTS.pack(self._received, sent)
        )

    def _answer(self, kind: DatagramKind, datagram: Datagram, body: bytes = b"") -> Datagram:
        return Datagram(kind, self._incarnation, datagram.sender, self._received, body)
