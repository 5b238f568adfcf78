"""A queue of outgoing messages in which a blocked recipient does not delay the others."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from cgd.secagg.messages import PeerId

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
