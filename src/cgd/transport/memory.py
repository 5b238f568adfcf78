"""The transport for members of one process: each member has an inbox."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from cgd.errors import ClosedError, MembershipError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cgd.secagg.messages import Buffer, PeerId

# Capacity of one inbox: it keeps the memory of m members from growing as m² vectors.
MAX_INBOX_BYTES = 16 << 20


class Inbox:
    """The queue of frames for one member."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._frames: deque[tuple[PeerId, Buffer]] = deque()
        self._bytes = 0
        self._woken = False
        self._closed = False

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._closed

    def put(self, sender: PeerId, frame: Buffer) -> bool:
        """Append a frame; return False if the inbox is full. An empty inbox accepts a frame of any size."""
        with self._changed:
            if self._closed:
                return True
            if self._frames and self._bytes + len(frame) > MAX_INBOX_BYTES:
                return False
            self._frames.append((sender, frame))
            self._bytes += len(frame)
            self._changed.notify()
            return True

    def get(self, timeout: float | None) -> tuple[PeerId, Buffer] | None:
        """Remove and return the next frame; wait for it at most `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._frames or self._woken or self._closed, timeout)
            if self._closed:
                raise ClosedError("this member's connection is closed; make new peers for further sums")
            if not self._frames:
                self._woken = False
                return None
            sender, frame = self._frames.popleft()
            self._bytes -= len(frame)
            return sender, frame

    def wakeup(self) -> None:
        """Make a blocked `get` call return."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def close(self) -> None:
        """Drop all frames, now and later."""
        with self._changed:
            self._closed = True
            self._frames.clear()
            self._changed.notify_all()


class MemoryTransport:
    """A member's connection with its peers in the same process; created by `connect`."""

    def __init__(self, me: PeerId, inboxes: Mapping[PeerId, Inbox]) -> None:
        self.me = me
        self.members = tuple(sorted(inboxes))
        self._inboxes = inboxes

    def send(self, to: PeerId, frame: Buffer) -> bool:
        """Put a frame into a peer's inbox; see `Transport.send`."""
        if to not in self._inboxes or to == self.me:
            raise MembershipError(f"{to} is not a peer of {self.me} ({', '.join(self.members)})")
        return self._inboxes[self.me].closed or self._inboxes[to].put(self.me, frame)

    def receive(self, timeout: float | None) -> tuple[PeerId, Buffer] | None:
        """Take the next frame from this member's inbox; see `Transport.receive`."""
        return self._inboxes[self.me].get(timeout)

    def wakeup(self) -> None:
        """Make a blocked `receive` call return; see `Transport.wakeup`."""
        self._inboxes[self.me].wakeup()

    def close(self) -> None:
        """Close this member's inbox; the frames that it has sent are in the inboxes of its peers."""
        self._inboxes[self.me].close()


def connect(members: Sequence[PeerId]) -> list[MemoryTransport]:
    """Return one connected transport for each member."""
    inboxes = {member: Inbox() for member in members}
    return [MemoryTransport(member, inboxes) for member in members]
