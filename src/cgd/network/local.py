"""`local_peers`: members that live in one process, for tests, notebooks and the demo."""

from __future__ import annotations

import os
import secrets
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from itertools import combinations
from typing import TYPE_CHECKING, Any, TypeVar

from cgd.errors import PeerAbortedError, PeerLeftError
from cgd.network.memory import connect
from cgd.network.peers import Peers, SumSettings
from cgd.protocol.messages import SESSION_BYTES, Opening, PeerId, Sharing
from cgd.protocol.secure_sum import check_members
from cgd.protocol.session import Session
from cgd.ring.sharing import KEY_BYTES, ExpandedShares

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import TracebackType

Result = TypeVar("Result")


class LocalPeers(tuple[Peers, ...]):
    """The connected members of one process, in the order of their names given. `local_peers` makes them."""

    __slots__ = ()

    def __enter__(self) -> LocalPeers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every member."""
        for peers in self:
            peers.close()

    def run(self, function: Callable[..., Result], *arguments: Iterable[Any]) -> list[Result]:
        """Call `function(peers, *arguments)` for every member, each in a thread of its own; the results in order.

        Like `map`, it takes one iterable for each further argument, with one element for each member. If a member
        fails, it leaves, the others stop waiting for it, and its error is raised.

        Examples:
            >>> import cgd, numpy as np
            >>> with cgd.local_peers(3) as colony:
            ...     colony.run(lambda peers, n: int(peers.sum(np.array(n))), [10, 20, 30])
            [60, 60, 60]
        """
        rows = list(zip(self, *(list(argument) for argument in arguments), strict=True))
        with ThreadPoolExecutor(max_workers=len(self), thread_name_prefix="cgd") as pool:
            futures = [pool.submit(function, *row) for row in rows]
            try:
                for future in as_completed(futures):
                    future.result()
            except BaseException as first:  # of a member, or an interrupt: the others must not wait in vain
                self.close()
                wait(futures)
                raise _cause(first, futures) from None
        return [future.result() for future in futures]


def _cause(first: BaseException, futures: Sequence[Future[Any]]) -> BaseException:
    """Of the errors of all members, one that is not merely about another's having given up."""
    errors = [first, *(error for future in futures if (error := future.exception()) is not None)]
    return next((error for error in errors if not isinstance(error, (PeerAbortedError, PeerLeftError))), first)


def local_peers(
    members: int | Sequence[PeerId],
    *,
    bound: float = 16.0,
    ring_bits: int = 32,
    sharing: Sharing = "expanded",
    opening: Opening = "mesh",
    aggregator: PeerId | None = None,
    timeout: float | None = 300.0,
) -> LocalPeers:
    """Connect members inside this process. They run the whole protocol; only the sockets are missing.

    Args:
        members: how many, or their names.
        bound: the largest magnitude of a value that is summed.
        ring_bits: 32, or 64 for more precision at twice the bytes.
        sharing: "expanded" or "uniform"; the total is the same, bit for bit.
        opening: "mesh" or "aggregator".
        aggregator: with opening="aggregator", the name of that member; the first if not given.
        timeout: how many seconds a member waits for a silent peer; None waits for ever.

    Raises:
        MembershipError: fewer than 3 members, or a name twice.

    Examples:
        >>> import cgd, numpy as np
        >>> with cgd.local_peers(["a", "b", "c"]) as colony:
        ...     colony.run(lambda peers: peers.sum(np.ones(2)))
        [array([3., 3.]), array([3., 3.]), array([3., 3.])]
    """
    names = [f"participant-{i + 1}" for i in range(members)] if isinstance(members, int) else list(members)
    check_members(names[0] if names else "", names)
    if opening == "aggregator" and aggregator is None:
        aggregator = names[0]
    settings = SumSettings(bound, ring_bits, sharing, opening, aggregator or "")
    session = os.urandom(SESSION_BYTES)
    keys: dict[PeerId, dict[PeerId, bytes]] = {name: {} for name in names}
    for one, other in combinations(names, 2):
        keys[one][other] = keys[other][one] = secrets.token_bytes(KEY_BYTES)
    return LocalPeers(
        Peers(transport, Session(name, names, session, ExpandedShares(name, keys[name])), settings, timeout)
        for name, transport in zip(names, connect(names), strict=True)
    )
