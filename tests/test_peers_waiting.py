"""`Peers.sum` with a member that is silent, leaves or is closed: the others wait no longer than their timeout."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cgd import Peers, local_peers
from cgd.errors import ClosedError, LocalProtocolError, PeerLeftError, PeerTimeoutError
from cgd.transport import driver
from cgd.transport.memory import connect
from support.transports import MEMBERS, TamperingTransport, custom_peers, outcomes

if TYPE_CHECKING:
    from cgd.secagg.messages import Buffer
    from cgd.transport.base import Transport


def test_timeout_names_the_silent_member() -> None:
    ended = threading.Semaphore(0)

    def work(peers: Peers) -> None:
        if peers.me == "c":  # silent until both others have ended
            assert all(ended.acquire(timeout=60) for _ in range(2))
            return
        try:
            peers.sum(np.ones(1))
        finally:
            ended.release()

    with local_peers(MEMBERS, timeout=0.2) as members:
        results = outcomes(members, work)
    assert results[2] is None
    timeouts = [error for error in results[:2] if isinstance(error, PeerTimeoutError)]
    assert timeouts
    assert all(error.peers == {"c"} for error in timeouts)
    assert "received nothing from c for 0.2 s (missing: Ready in sum 1)" in str(timeouts[0])


def test_error_names_a_member_that_leaves_at_once() -> None:
    with local_peers(MEMBERS) as members:
        started = time.monotonic()
        results = outcomes(members, lambda peers: peers.close() if peers.me == "c" else peers.sum(np.ones(1)))
        assert time.monotonic() - started < 20
        assert all(isinstance(error, PeerLeftError) and error.peer == "c" for error in results[:2])
        with pytest.raises(ClosedError, match="is closed"):
            members[2].sum(np.ones(1))


def start_sum_in_thread(peers: Peers) -> tuple[threading.Thread, list[Exception]]:
    """Start a sum in another thread; return the thread and the list for its error."""
    errors: list[Exception] = []

    def run_sum() -> None:
        try:
            peers.sum(np.ones(1))
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run_sum)
    thread.start()
    while peers.traffic.frames_sent == 0:
        time.sleep(0.001)
    return thread, errors


def test_close_in_another_thread_stops_a_sum_at_every_member() -> None:
    with local_peers(MEMBERS) as members:
        threads = [start_sum_in_thread(peers) for peers in members[:2]]
        started = time.monotonic()
        members[0].close()
        for thread, _ in threads:
            thread.join()
        assert time.monotonic() - started < 20
        (own,), (other,) = (errors for _, errors in threads)
        assert isinstance(own, ClosedError)
        assert isinstance(other, PeerLeftError)
        assert other.peer == "a"


def test_second_sum_at_the_same_time_raises() -> None:
    with local_peers(MEMBERS) as members:
        thread, errors = start_sum_in_thread(members[0])
        with pytest.raises(LocalProtocolError, match="in a sum already"):
            members[0].sum(np.ones(1))
        members[0].close()
        thread.join()
        assert isinstance(errors[0], ClosedError)


class SimulatedClock(threading.local):
    """Replaces the module `time`: each thread has a clock, which advances only by `sleep`."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class SlowTransport(TamperingTransport):
    """A transport on which every frame takes some seconds of a simulated clock."""

    def __init__(self, inner: Transport, clock: SimulatedClock, seconds: float) -> None:
        super().__init__(inner, lambda frame: frame)
        self._clock, self._seconds = clock, seconds

    def receive(self, timeout: float | None) -> tuple[str, Buffer] | None:
        if timeout is not None and timeout < self._seconds:
            self._clock.sleep(timeout)
            return None
        received = super().receive(60)
        self._clock.sleep(self._seconds)
        return received


@pytest.mark.parametrize(("seconds", "in_time"), [(2.5, True), (3.9, True), (4.1, False)])
def test_timeout_restarts_with_every_frame(seconds: float, in_time: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a timeout of four seconds, a sum may take longer, but no frame may."""
    clock = SimulatedClock()
    monkeypatch.setattr(driver, "time", clock)

    def work(peers: Peers) -> tuple[Any, float]:
        try:
            return float(peers.sum(np.ones(1))[0]), clock.now
        except PeerTimeoutError as error:
            return error, clock.now

    transports = [SlowTransport(each, clock, seconds) for each in connect(MEMBERS)]
    with custom_peers(transports, timeout=4) as members:
        results = members.run(work)
    if in_time:
        assert [total for total, _ in results] == [3.0] * 3
        assert min(taken for _, taken in results) > 4
    else:
        assert all(isinstance(error, PeerTimeoutError) and taken == 4 for error, taken in results)
