"""Members that run together in one process: `colony.run`."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from cgd import InputError, PeerLeftError, Peers, RangeError, local_peers
from support.transports import MEMBERS


def test_run_raises_the_cause_and_not_its_consequences_and_names_the_member() -> None:
    def work(peers: Peers) -> None:
        if peers.me == "b":
            raise ZeroDivisionError("in the training loop")
        peers.sum(np.ones(1))

    def nan(peers: Peers) -> None:
        peers.sum(np.array([np.nan if peers.me == "b" else 1.0]))

    for function, error in ((work, ZeroDivisionError), (nan, RangeError)):
        for _ in range(50):
            with local_peers(MEMBERS) as colony, pytest.raises(error) as caught:
                colony.run(function)
            assert caught.value.__notes__ == ["This was raised at member b."]


def test_a_member_that_returns_too_early_is_named_at_once() -> None:
    def work(peers: Peers) -> None:
        for _ in range(3 if peers.me == "b" else 5):
            peers.sum(np.ones(1))

    begun = time.monotonic()
    with local_peers(MEMBERS) as colony, pytest.raises(PeerLeftError, match="b: has left the session before sum 4"):
        colony.run(work)
    assert time.monotonic() - begun < 20


def test_members_can_run_several_times() -> None:
    with local_peers(MEMBERS) as colony:
        for _ in range(20):
            assert colony.run(lambda peers: float(peers.sum(np.ones(1))[0])) == [3.0] * 3


def test_a_failure_closes_the_other_peers_among_the_arguments_too() -> None:
    everyone, group = local_peers(MEMBERS), local_peers(MEMBERS)

    def work(peers: Peers, own: Peers) -> None:
        if peers.me == "b":
            raise ZeroDivisionError
        own.sum(np.ones(1))

    begun = time.monotonic()
    with everyone, group, pytest.raises(ZeroDivisionError):
        everyone.run(work, group)
    assert time.monotonic() - begun < 20


def test_arguments_must_be_as_many_as_members() -> None:
    with local_peers(MEMBERS) as colony, pytest.raises(InputError, match="3 members need 3 elements .* there are 2"):
        colony.run(lambda peers, value: None, [1, 2])


def test_a_member_that_returns_while_others_need_it_elsewhere_is_named_at_once() -> None:
    everyone, group = local_peers(MEMBERS), local_peers(MEMBERS)

    def work(peers: Peers, own: Peers) -> None:
        peers.sum(np.ones(1))
        if peers.me != "b":
            own.sum(np.ones(1))

    begun = time.monotonic()
    with everyone, group, pytest.raises(PeerLeftError, match="b: has left"):
        everyone.run(work, group)
    assert time.monotonic() - begun < 20


def test_an_interrupt_of_the_caller_is_raised_as_it_is_and_at_once() -> None:
    """As by Ctrl-C, or a signal's handler: here an exception from the list that `run` waits on."""

    class Stop(BaseException):
        pass

    def stop(*_: object, **__: object) -> None:
        raise Stop

    released = threading.Event()
    with local_peers(MEMBERS) as colony, pytest.MonkeyPatch.context() as patch:
        patch.setattr("cgd.local.wait", stop)
        begun = time.monotonic()
        with pytest.raises(Stop):
            colony.run(lambda peers: released.wait(30))
        assert time.monotonic() - begun < 10
        released.set()
