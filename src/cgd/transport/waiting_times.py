"""How long our program computed, summed and waited, and for whose messages: measured here, from what arrives anyway.

Nothing is sent for it. A wait is counted for every peer whose message is missing, and by what is missing. That is a
fact about messages and not about fault: a member that withholds a message from one peer makes that peer late at all
others. In the peer's own figures, the wait is counted for that member; so compare the figures of both.
"""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from cgd.errors import InputError, MembershipError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cgd.secagg.membership import Membership
    from cgd.secagg.messages import PeerId

DECIMALS = 3  # of stored seconds


@dataclass
class PeerTimes:
    """The seconds for which our program waited for a peer.

    Attributes:
        computing: for its `Ready`, which its program sends when it has computed its addend.
        summing: for any other message: of a sum, or of the return of a member that was restarted.
        away: while it was not connected, or had not sent its hello yet.
        alone: those of the above in which it was the only one that we waited for.
    """

    computing: float = 0.0
    summing: float = 0.0
    away: float = 0.0
    alone: float = 0.0

    @property
    def total(self) -> float:
        """All seconds for which our program waited for it."""
        return self.computing + self.summing + self.away


@dataclass
class WaitingTimes:
    """The seconds since this process was started, up to the end of its program.

    Attributes:
        computing: our program computed, outside of sums.
        summing: our own work in sums, and their transfer.
        waiting: in sums, for messages of others.
        kept: those of `computing` in which all others were ready and waited for us.
        peers: the seconds for which we waited for each peer, or for the hub; of two at a time, both count.
    """

    computing: float = 0.0
    summing: float = 0.0
    waiting: float = 0.0
    kept: float = 0.0
    peers: dict[PeerId, PeerTimes] = field(default_factory=dict)

    def ordered(self) -> list[tuple[PeerId, PeerTimes]]:
        """Return the peers, those that we waited for longest first."""
        return sorted(self.peers.items(), key=lambda item: (-item[1].total, item[0]))

    def describe(self) -> list[str]:
        """Return lines for a log.

        Examples:
            >>> times = WaitingTimes(computing=12, summing=0.25, waiting=30, peers={"ada": PeerTimes(20, away=10)})
            >>> for line in times.describe():
            ...     print(line)
            we computed for 12.0 s, summed for 0.2 s and waited for 30.0 s; all others waited for us for 0.0 s
            waited 30.0 s for ada: computing 20.0 s, summing 0.0 s, away 10.0 s; 0.0 s for it alone
        """
        own = f"we computed for {self.computing:.1f} s, summed for {self.summing:.1f} s and waited for "
        lines = [f"{own}{self.waiting:.1f} s; all others waited for us for {self.kept:.1f} s"]
        for peer, each in self.ordered():
            parts = f"computing {each.computing:.1f} s, summing {each.summing:.1f} s, away {each.away:.1f} s"
            lines.append(f"waited {each.total:.1f} s for {peer}: {parts}; {each.alone:.1f} s for it alone")
        return lines

    def stored(self) -> dict[str, object]:
        """Return the content for a JSON file."""
        return json.loads(json.dumps(asdict(self)), parse_float=lambda text: round(float(text), DECIMALS))  # type: ignore[no-any-return]

    @classmethod
    def from_json(cls, text: bytes) -> WaitingTimes:
        """Return times that were stored as JSON.

        Raises:
            InputError: it is not such a document.
        """
        try:
            content = json.loads(text)
            peers = {str(name): PeerTimes(**_numbers(each)) for name, each in content.pop("peers").items()}
            return cls(**_numbers(content), peers=peers)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise InputError(f"it does not contain waiting times ({error}); delete it") from None


class WaitingClock:
    """Measures `WaitingTimes`.

    The program's thread marks when it waits, and the runtime's thread when it has nothing to do until a message comes.
    Only time in which both is the case is counted as a wait for others.

    Attributes:
        absent: the peers that are not connected.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.absent: frozenset[PeerId] = frozenset()
        self._clock = clock
        self._lock = threading.Lock()
        self._times = WaitingTimes()
        self._last = clock()
        self._group: str | None = None
        self._what, self._missing, self._keeps = "", frozenset[str](), False
        self._stopped = False

    def times(self) -> WaitingTimes:
        """Return the times up to now."""
        with self._lock:
            self._advance()
            return deepcopy(self._times)

    @contextmanager
    def in_sum(self, group: str) -> Iterator[None]:
        """Mark that our program waits for a sum of this group, or for the other members before it."""
        self._set(group)
        try:
            yield
        finally:
            self._set(None)

    def idle(self, membership: Membership) -> None:
        """Mark that we have nothing to do until a message arrives."""
        with self._lock:
            self._advance()
            self._missing, self._keeps = frozenset(), False
            if self._group is None:
                sessions = (membership.group(name).session for name in membership.groups)
                self._keeps = any(each is not None and each.keeps_others_waiting for each in sessions)
                return
            with suppress(MembershipError):  # the group is gone: the program finds that out itself
                self._what, self._missing = membership.waiting_for(self._group)

    def busy(self) -> None:
        """Mark that we process or send messages."""
        with self._lock:
            self._advance()
            self._missing, self._keeps = frozenset(), False

    def stop(self) -> None:
        """Count nothing from now on: our program has ended."""
        with self._lock:
            self._advance()
            self._stopped = True

    def _set(self, group: str | None) -> None:
        with self._lock:
            self._advance()
            self._group, self._missing, self._keeps = group, frozenset(), False

    def _advance(self) -> None:
        now = self._clock()
        seconds, self._last = now - self._last, now
        times = self._times
        if self._stopped:
            return
        if self._group is None:
            times.computing += seconds
            times.kept += seconds if self._keeps else 0.0
            return
        if not self._missing:
            times.summing += seconds
            return
        times.waiting += seconds
        for peer in self._missing:
            each = times.peers.setdefault(peer, PeerTimes())
            if peer in self.absent or self._what == "its hello":
                each.away += seconds
            elif self._what == "Ready":
                each.computing += seconds
            else:
                each.summing += seconds
            each.alone += seconds if len(self._missing) == 1 else 0.0


def _numbers(content: dict[str, object]) -> dict[str, float]:
    if not all(type(each) in (int, float) for each in content.values()):
        raise TypeError("a duration is not a number")
    return {name: float(str(each)) for name, each in content.items()}
