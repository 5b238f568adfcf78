"""`local_peers`: members that live in one process; `solo_peers`: one that sums with nobody."""

from __future__ import annotations

import os
import secrets
import threading
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import AbstractContextManager, nullcontext
from itertools import combinations
from typing import TYPE_CHECKING, Any, TypeVar

from cgd.errors import ClosedError, InputError, PeerAbortedError, PeerLeftError
from cgd.peers import Peers, SumSettings
from cgd.secagg.masking import KEY_BYTES
from cgd.secagg.messages import SESSION_BYTES, Opening, PeerId, Sharing
from cgd.secagg.partition import check_members
from cgd.secagg.session import Session
from cgd.transport.driver import FAREWELL_SECONDS, NoRecovery, SessionDriver, Traffic
from cgd.transport.memory import connect
from cgd.transport.tap import TappedTransport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import TracebackType

    import numpy.typing as npt

    from cgd.secagg.journal import Step
    from cgd.secagg.messages import Reason, SumSpec
    from cgd.transport.base import Transport
    from cgd.transport.tap import Sink

Result = TypeVar("Result")

# How often `run` looks whether a member waits for one that has returned.
LOOK_SECONDS = 0.2


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
        fails, all members are closed, other `Peers` among the arguments too, and its error is raised, with a note that
        names it. A member whose function returns while another still needs it for a sum is closed, and the other told.

        Examples:
            >>> import cgd, numpy as np
            >>> with cgd.local_peers(3) as colony:
            ...     colony.run(lambda peers, n: int(peers.sum(np.array(n))), [10, 20, 30])
            [60, 60, 60]
        """
        columns = [list(self), *(list(argument) for argument in arguments)]
        if any(len(column) != len(self) for column in columns):
            sizes = ", ".join(str(len(column)) for column in columns[1:])
            raise InputError(f"{len(self)} members need {len(self)} elements of every argument; there are {sizes}")
        rows = list(zip(*columns, strict=True))
        futures: list[Future[Result]] = [Future() for _ in rows]
        for future, row in zip(futures, rows, strict=True):
            threading.Thread(target=_fulfil, args=(future, function, row), name=f"cgd-{row[0].me}").start()
        try:
            while (state := wait(futures, timeout=LOOK_SECONDS, return_when=FIRST_EXCEPTION)).not_done:
                for future in state.done:
                    future.result()
                _dismiss_idle([(row, future.done()) for row, future in zip(rows, futures, strict=True)])
            return [future.result() for future in futures]
        except BaseException as error:
            for peers in (each for row in rows for each in _peers_in(row)):
                peers.close()
            if not any(future.done() and future.exception() is error for future in futures):
                raise  # an interrupt: not of a member, and not to be kept waiting by one
            wait(futures, timeout=FAREWELL_SECONDS)
            raise self._cause(futures) from None

    def _cause(self, futures: Sequence[Future[Any]]) -> BaseException:
        """Of the errors of all members, one that is not merely about another's having given up."""
        errors = [
            (peers.me, error)
            for peers, future in zip(self, futures, strict=True)
            if future.done() and (error := future.exception()) is not None
        ]
        consequences = (PeerAbortedError, PeerLeftError, ClosedError)
        # Sorting keeps the order, and puts what was caused by others behind the rest, our own closing last.
        errors.sort(key=lambda pair: isinstance(pair[1], consequences) + isinstance(pair[1], ClosedError))
        name, error = errors[0]
        error.add_note(f"This was raised at member {name}.")
        return error


def _peers_in(row: Sequence[Any]) -> list[Peers]:
    return [each for each in row if isinstance(each, Peers)]


def _dismiss_idle(rows: Sequence[tuple[Sequence[Any], bool]]) -> None:
    """Close the peers of members that have returned and that another member waits for in a later sum."""
    furthest: dict[bytes, int] = {}
    for peers in (each for row, _ in rows for each in _peers_in(row)):
        furthest[peers.session] = max(peers.number, furthest.get(peers.session, 0))
    for peers in (each for row, returned in rows if returned for each in _peers_in(row)):
        if peers.number < furthest[peers.session]:
            peers.close()


def _fulfil(future: Future[Result], function: Callable[..., Result], row: Sequence[Any]) -> None:
    try:
        future.set_result(function(*row))
    except BaseException as error:
        future.set_exception(error)


def local_peers(
    members: int | Sequence[PeerId],
    *,
    bound: float = 16.0,
    ring_bits: int = 32,
    sharing: Sharing = "expanded",
    opening: Opening = "mesh",
    aggregator: PeerId | None = None,
    timeout: float | None = 300.0,
    sinks: Mapping[PeerId, Sink] | None = None,
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
        sinks: of members that record, by name: what is given every frame that one receives, and its sender.

    Raises:
        MembershipError: fewer than 3 members, or a name twice.

    Examples:
        >>> import cgd, numpy as np
        >>> with cgd.local_peers(["a", "b", "c"]) as colony:
        ...     colony.run(lambda peers: peers.sum(np.ones(2)))
        [array([3., 3.]), array([3., 3.]), array([3., 3.])]
    """
    if isinstance(members, (float, str)):
        raise InputError(f"members is {members!r}; it is a whole number, or a list of names")
    names = [f"participant-{i + 1}" for i in range(members)] if isinstance(members, int) else list(members)
    check_members(names[0] if names else "", names)
    if opening == "hub":
        raise InputError("there is no hub inside one process; choose mesh or aggregator")
    if opening == "aggregator" and aggregator is None:
        aggregator = names[0]
    settings = SumSettings(bound, ring_bits, sharing, opening, aggregator or "")
    session = os.urandom(SESSION_BYTES)
    keys: dict[PeerId, dict[PeerId, bytes]] = {name: {} for name in names}
    for one, other in combinations(names, 2):
        keys[one][other] = keys[other][one] = secrets.token_bytes(KEY_BYTES)
    transports: list[Transport] = [
        TappedTransport(each, sinks[each.me]) if sinks and each.me in sinks else each for each in connect(names)
    ]
    return LocalPeers(
        Peers(SessionDriver(transport, Session(name, names, session, keys[name]), timeout), settings)
        for name, transport in zip(names, transports, strict=True)
    )


def solo_peers(seed: bytes | None = None, name: PeerId = "alone", **settings: Any) -> Peers:
    """Peers without anybody else: a sum is the own value, rounded by the fixed point as in a federation.

    For comparisons only: nothing is hidden, because there is nobody to hide it from.

    Args:
        seed: 32 bytes for the origin.
        name: of the only participant.
        settings: those of `SumSettings`.

    Examples:
        >>> import numpy as np
        >>> solo_peers().sum(np.array([0.5, 0.25]))
        array([0.5 , 0.25])
    """
    return Peers(_Solo(name), SumSettings(**settings), seed=seed)


class _Solo(NoRecovery):
    """Drives sums of one addend; see `cgd.transport.driver.Driver`."""

    def __init__(self, me: PeerId) -> None:
        self.me, self.members = me, (me,)
        self.traffic = Traffic()
        self.session = bytes(16)
        self.number = 0
        self._closed = False

    def turn(self) -> AbstractContextManager[None]:
        return nullcontext()

    def total(
        self,
        spec: SumSpec,  # noqa: ARG002
        encode: Callable[[], npt.NDArray[Any]],
        epoch: int,  # noqa: ARG002
        step: Step | None,  # noqa: ARG002
    ) -> npt.NDArray[Any]:
        if self._closed:
            raise ClosedError(f"the connection of {self.me} is closed; make new peers for further sums")
        self.number += 1
        self.traffic.sums += 1
        return encode()

    def refuse(self, reason: Reason) -> None:  # noqa: ARG002
        self.number += 1

    def close(self, *, done: bool) -> None:  # noqa: ARG002
        self._closed = True

    def outlook(self) -> tuple[int, int]:
        return 0, 1
