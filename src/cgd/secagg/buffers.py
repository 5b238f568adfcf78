"""Large messages in memory that is used again: fresh memory costs several times as much as the copy into it.

The system clears every page of fresh memory when it is first touched. A buffer of a `BufferPool` returns to the pool
when nothing refers to it any more: no message, no link, no socket.

A message passes several layers, and each puts a header before it. So a buffer begins with room for headers, and `join`
writes a header there in place of copying the message behind it.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from cgd.secagg.messages import Buffer

# Smaller messages are ordinary objects: that costs less, and many of them do not occupy more than their bytes.
MIN_BYTES = 1 << 16
ROOM = 128  # for the headers of a link and of an encrypted message; a multiple of 64, so that words are aligned
_UNIT = 1 << 14  # buffers of similar sizes are exchangeable
MAX_FREE_BYTES = 32 << 20


class _Message(np.ndarray[Any, Any]):
    """The memory of one message; `start` is where it begins, after the room for further headers."""

    start = 0

    def has_room(self, size: int, content: Buffer) -> bool:
        """Return whether a header of this size can be put before the content, which has none yet."""
        return len(self) - self.start == len(content) and self.start >= size

    def prepend(self, *parts: Buffer) -> Buffer:
        """Write these parts before the present beginning; return the message as it is now."""
        memory = self.data
        at = self.start = self.start - sum(map(len, parts))
        for part in parts:
            memory[at : at + len(part)] = part
            at += len(part)
        return memory[self.start :].toreadonly()


class BufferPool:
    """Memory for messages; any thread may call it.

    Examples:
        >>> pool = BufferPool()
        >>> message = pool.join(b"head", bytes(MIN_BYTES))
        >>> len(message) - MIN_BYTES, bytes(message[:4])
        (4, b'head')
        >>> bytes(pool.join(b"header", message)[:10])
        b'headerhead'
    """

    def __init__(self) -> None:
        self._free: dict[int, list[npt.NDArray[np.uint8]]] = {}

    def join(self, *parts: Buffer) -> Buffer:
        """Return the parts as one message that nobody changes.

        A last part that is itself a message of a pool, and has room before it, is not copied.
        """
        size = sum(map(len, parts))
        if size < MIN_BYTES:
            return b"".join(parts)
        *headers, content = parts
        message: object = content.obj if isinstance(content, memoryview) else None
        if isinstance(message, _Message) and message.has_room(size - len(content), content):
            return message.prepend(*headers)
        return self._take(size).prepend(*parts)

    def take(self, size: int) -> memoryview:
        """Return memory of this size, to be written to once."""
        if size < MIN_BYTES:
            return memoryview(bytearray(size))
        message = self._take(size)
        message.start -= size
        return message.data[message.start :]

    def _take(self, size: int) -> _Message:
        """Return the memory of a message of this size; it begins at its end until its bytes are there."""
        capacity = -(-(ROOM + size) // _UNIT) * _UNIT
        try:
            memory = self._free[capacity].pop()
        except (KeyError, IndexError):
            memory = np.empty(capacity, dtype=np.uint8)
        message = memory[: ROOM + size].view(_Message)
        message.start = ROOM + size
        weakref.finalize(message, self._release, memory).atexit = False
        return message

    def _release(self, memory: npt.NDArray[np.uint8]) -> None:
        free = sum(size * len(each) for size, each in list(self._free.items()))
        if free + len(memory) <= MAX_FREE_BYTES:
            self._free.setdefault(len(memory), []).append(memory)


pool = BufferPool()
