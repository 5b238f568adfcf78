"""Members of one process: `LocalPeers.run`."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from cgd import InputError, PeerLeftError, Peers, RangeError, local_peers
from support.transports import MEMBERS


def test_run_raises_the_original_error_with_the_name_of_the_member() -> None:
    def work(peers: Peers) -> None:
        if peers.me == "b":
            raise ZeroDivisionError("in the training loop")
        peers.sum(np.ones(1))

    def nan(peers: Peers) -> None:
        peers.sum(np.array([np.nan if peers.me == "b" else 1.0]))

    for function, error in ((work, ZeroDivisionError), (nan, RangeError)):
        for _ in range(50):
            with local_peers(MEMBERS) as members, pytest.raises(error) as caught:
                members.run(function)
            assert caught.value.__notes__ == ["This was raised at member b."]


def test_run_reports_at_once_a_member_that_returns_too_early() -> None:
    def work(peers: Peers) -> None:
        for _ in range(3 if peers.me == "b" else 5):
            peers.sum(np.ones(1))

    started = time.monotonic()
    with local_peers(MEMBERS) as members, pytest.raises(PeerLeftError, match="b: left the session before sum 4"):
        members.run(work)
    assert time.monotonic() - started < 20


def test_run_can_be_called_several_times() -> None:
    with local_peers(MEMBERS) as members:
        for _ in range(20):
            assert members.run(lambda peers: float(peers.sum(np.ones(1))[0])) == [3.0] * 3


def test_failure_closes_other_peers_among_the_arguments() -> None:
    everyone, group = local_peers(MEMBERS), local_peers(MEMBERS)

    def work(peers: Peers, own: Peers) -> None:
        if peers.me == "b":
            raise ZeroDivisionError
        own.sum(np.ones(1))

    started = time.monotonic()
    with everyone, group, pytest.raises(ZeroDivisionError):
        everyone.run(work, group)
    assert time.monotonic() - started < 20


def test_run_rejects_arguments_that_do_not_match_the_number_of_members() -> None:
    with local_peers(MEMBERS) as members, pytest.raises(InputError, match="3 members need 3 elements .* there are 2"):
        members.run(lambda peers, value: None, [1, 2])


def test_run_reports_at_once_a_member_that_returns_while_another_group_needs_it() -> None:
    everyone, group = local_peers(MEMBERS), local_peers(MEMBERS)

    def work(peers: Peers, own: Peers) -> None:
        peers.sum(np.ones(1))
        if peers.me != "b":
            own.sum(np.ones(1))

    started = time.monotonic()
    with everyone, group, pytest.raises(PeerLeftError, match="b: left"):
        everyone.run(work, group)
    assert time.monotonic() - started < 20


def test_interrupt_of_the_caller_is_raised_unchanged_and_at_once() -> None:
    """It simulates Ctrl-C or a signal handler by an exception in the function that `run` waits in."""

    class Stop(BaseException):
        pass

    def stop(*_: object, **__: object) -> None:
        raise Stop

    released = threading.Event()
    with local_peers(MEMBERS) as members, pytest.MonkeyPatch.context() as patch:
        patch.setattr("cgd.local.wait", stop)
        started = time.monotonic()
        with pytest.raises(Stop):
            members.run(lambda peers: released.wait(30))
        assert time.monotonic() - started < 10
        released.set()
