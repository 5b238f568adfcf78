"""`local_peers`: members in one process; `solo_peers`: a single member without peers, for comparisons."""

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
from cgd.secagg.messages import SESSION_BYTES, Masking, Opening, PeerId
from cgd.secagg.reduction import check_members
from cgd.secagg.session import Session
from cgd.transport.driver import FLUSH_SECONDS, SessionDriver, Traffic
from cgd.transport.memory import connect
from cgd.transport.tap import TappedTransport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import TracebackType

    import numpy.typing as npt

    from cgd.secagg.journal_entry import Step
    from cgd.secagg.messages import Reason, SumSpec
    from cgd.transport.base import Transport
    from cgd.transport.tap import FrameSink

Result = TypeVar("Result")

# How often `run` checks for members that wait for one whose function has returned.
POLL_SECONDS = 0.2


class LocalPeers(tuple[Peers, ...]):
    """The connected members of one process, in the order of the given names; created by `local_peers`."""

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
        """Call `function(peers, *arguments)` for every member in its own thread; return the results in order.

        As in `map`, each further argument is an iterable with one element for each member. If a member fails, all
        members are closed, and other `Peers` among the arguments, too; its error is raised, with a note that names the
        member. If a member's function returns while another member needs it for a sum, that sum fails.

        Examples:
            >>> import cgd, numpy as np
            >>> with cgd.local_peers(3) as members:
            ...     members.run(lambda peers, n: int(peers.sum(np.array(n))), [10, 20, 30])
            [60, 60, 60]
        """
        columns = [list(self), *(list(argument) for argument in arguments)]
        if any(len(column) != len(self) for column in columns):
            sizes = ", ".join(str(len(column)) for column in columns[1:])
            raise InputError(f"{len(self)} members need {len(self)} elements of every argument; there are {sizes}")
        rows = list(zip(*columns, strict=True))
        futures: list[Future[Result]] = [Future() for _ in rows]
        for future, row in zip(futures, rows, strict=True):
            threading.Thread(target=_run_member, args=(future, function, row), name=f"cgd-{row[0].me}").start()
        try:
            while (state := wait(futures, timeout=POLL_SECONDS, return_when=FIRST_EXCEPTION)).not_done:
                for future in state.done:
                    future.result()
                _close_returned([(row, future.done()) for row, future in zip(rows, futures, strict=True)])
            return [future.result() for future in futures]
        except BaseException as error:
            for peers in (each for row in rows for each in _peers_in(row)):
                peers.close()
            if not any(future.done() and future.exception() is error for future in futures):
                raise  # an interrupt of the caller: raised at once, without waiting for the members
            wait(futures, timeout=FLUSH_SECONDS)
            raise self._cause(futures) from None

    def _cause(self, futures: Sequence[Future[Any]]) -> BaseException:
        """Return the first error that is not merely the consequence of another member's failure."""
        errors = [
            (peers.me, error)
            for peers, future in zip(self, futures, strict=True)
            if future.done() and (error := future.exception()) is not None
        ]
        consequences = (PeerAbortedError, PeerLeftError, ClosedError)
        # A stable sort: errors caused by other members come after the rest, our own closing comes last.
        errors.sort(key=lambda pair: isinstance(pair[1], consequences) + isinstance(pair[1], ClosedError))
        name, error = errors[0]
        error.add_note(f"This was raised at member {name}.")
        return error


def _peers_in(row: Sequence[Any]) -> list[Peers]:
    return [each for each in row if isinstance(each, Peers)]


def _close_returned(rows: Sequence[tuple[Sequence[Any], bool]]) -> None:
    """Close the peers of members that have returned while another member waits for them in a later sum."""
    latest: dict[bytes, int] = {}
    for peers in (each for row, _ in rows for each in _peers_in(row)):
        latest[peers.session_id] = max(peers.number, latest.get(peers.session_id, 0))
    for peers in (each for row, returned in rows if returned for each in _peers_in(row)):
        if peers.number < latest[peers.session_id]:
            peers.close()


def _run_member(future: Future[Result], function: Callable[..., Result], row: Sequence[Any]) -> None:
    try:
        result = function(*row)
        for peers in _peers_in(row):
            peers.queue.finish()
        future.set_result(result)
    except BaseException as error:
        future.set_exception(error)


def local_peers(
    members: int | Sequence[PeerId],
    *,
    bound: float = 16.0,
    ring_bits: int = 32,
    masking: Masking = "pairwise",
    opening: Opening = "mesh",
    aggregator: PeerId | None = None,
    timeout: float | None = 300.0,
    sinks: Mapping[PeerId, FrameSink] | None = None,
) -> LocalPeers:
    """Connect members in this process. They run the whole protocol; only the network is missing.

    Args:
        members: the number of members, or their names.
        bound: the largest magnitude of a value that is summed.
        ring_bits: 32; 64 for more precision at twice the bytes; or 16, see `cgd.SumSettings`.
        masking: "pairwise" or "uniform"; the total is bit for bit the same.
        opening: "mesh" or "aggregator".
        aggregator: with opening="aggregator", the name of that member; the first if not given.
        timeout: seconds to wait for a peer from which nothing is received; None waits without limit.
        sinks: for members that record, by name: a function that is called with the sender and bytes of every received
            frame.

    Raises:
        MembershipError: fewer than 3 members, or a name twice.

    Examples:
        >>> import cgd, numpy as np
        >>> with cgd.local_peers(["a", "b", "c"]) as members:
        ...     members.run(lambda peers: peers.sum(np.ones(2)))
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
    settings = SumSettings(bound, ring_bits, masking, opening, aggregator or "")
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
    """Return a single member without peers: a sum is its own value, rounded in fixed point as in a federation.

    For comparisons only: there are no peers, so nothing is hidden.

    Args:
        seed: 32 bytes for the origin.
        name: the name of the only participant.
        settings: the settings of `SumSettings`.

    Examples:
        >>> import numpy as np
        >>> solo_peers().sum(np.array([0.5, 0.25]))
        array([0.5 , 0.25])
    """
    return Peers(_SoloDriver(name), SumSettings(**settings), seed=seed)


class _SoloDriver:
    """Runs sums of one addend; see `cgd.transport.driver.Driver`."""

    def __init__(self, me: PeerId) -> None:
        self.me, self.members = me, (me,)
        self.traffic, self.waiting = Traffic(), None
        self.session_id = bytes(SESSION_BYTES)
        self.number = 0
        self._closed = False

    def exclusive(self) -> AbstractContextManager[None]:
        return nullcontext()

    def run_sum(
        self,
        spec: SumSpec,  # noqa: ARG002
        encode: Callable[[], npt.NDArray[Any]],
        epoch: int,  # noqa: ARG002
        step: Step | None,  # noqa: ARG002
        before_reveal: Callable[[], None],
    ) -> npt.NDArray[Any]:
        if self._closed:
            raise ClosedError(f"the connection of {self.me} is closed; make new peers for further sums")
        self.number += 1
        self.traffic.sums += 1
        addend = encode()
        before_reveal()
        return addend

    def abort_sum(self, reason: Reason) -> None:  # noqa: ARG002
        self.number += 1

    def repeat_sum(self) -> None:
        """Do nothing."""

    def close(self, *, done: bool) -> None:  # noqa: ARG002
        self._closed = True

    @property
    def epoch(self) -> int:
        return 0

    @property
    def quorum(self) -> None:
        return None

    def next_round(self) -> tuple[int, int]:
        return self.epoch, 1
