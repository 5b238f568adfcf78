"""Observers and sinks receive all addends, totals and frames at the right moment, and change nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import cgd
from cgd.errors import InputError, RangeError
from cgd.secagg.codec import from_bytes
from cgd.secagg.journal_entry import Step

if TYPE_CHECKING:
    import numpy.typing as npt

    from cgd.transport.tap import Addend, FrameSink

NAMES = ("a", "b", "c")


class RecordingObserver:
    """An observer that stores all calls, and the number of frames sent before each."""

    def __init__(self, peers: cgd.Peers) -> None:
        self.peers = peers
        self.addends: list[tuple[Addend, int]] = []
        self.totals: list[tuple[Addend, npt.NDArray[Any]]] = []
        peers.observer = self

    def before_sum(self, addend: Addend) -> None:
        self.addends.append((addend, self.peers.traffic.frames_sent))

    def after_sum(self, addend: Addend, total: npt.NDArray[Any]) -> None:
        self.totals.append((addend, total.copy()))


def test_observer_receives_the_addend_before_a_frame_is_sent_and_the_total_after_the_sum() -> None:
    values = [np.array([1.5, -2.0]), np.array([0.25, 1.0]), np.array([4.0, 0.0])]
    weights = [0.5, 0.25, 0.25]

    def work(peers: cgd.Peers, own: npt.NDArray[Any], weight: float) -> tuple[RecordingObserver, npt.NDArray[Any]]:
        observer = RecordingObserver(peers)
        return observer, peers.sum(own, weight=weight, context="trial", step=Step(0, 7))

    with cgd.local_peers(NAMES) as members:
        results = members.run(work, values, weights)
    for (observer, total), own, weight in zip(results, values, weights, strict=True):
        ((addend, sent),) = observer.addends
        assert np.array_equal(addend.values, own)
        assert (addend.weight, addend.context, addend.step) == (weight, "trial", Step(0, 7))
        assert (addend.members, addend.epoch, sent) == (NAMES, 0, 0)
        ((after, observed),) = observer.totals
        assert after is addend
        assert np.array_equal(observed, total)


def test_before_sum_is_not_called_for_a_replayed_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restarted member reads the total from the journal; its addend is not used."""

    def work(peers: cgd.Peers) -> RecordingObserver:
        observer = RecordingObserver(peers)
        monkeypatch.setattr(peers.recovery, "is_replay", lambda: True)
        peers.sum(np.ones(2))
        monkeypatch.setattr(peers.recovery, "is_replay", lambda: False)
        peers.sum(np.ones(2))
        return observer

    with cgd.local_peers(NAMES) as members:
        for observer in members.run(work):
            assert (len(observer.addends), len(observer.totals)) == (1, 2)


def test_addend_is_not_sent_if_the_observer_fails() -> None:
    class FailingObserver(RecordingObserver):
        def before_sum(self, addend: Addend) -> None:
            raise InputError("the disk is full; make room")

    def work(peers: cgd.Peers) -> None:
        if peers.me == "b":
            FailingObserver(peers)
        peers.sum(np.ones(3))

    with cgd.local_peers(NAMES) as members:
        with pytest.raises(InputError, match="the disk is full") as caught:
            members.run(work)
        assert caught.value.__notes__ == ["This was raised at member b."]
        assert all(peers.traffic.sums == 0 for peers in members)


def test_value_out_of_range_is_rejected_before_the_observer_is_called() -> None:
    observers: list[RecordingObserver] = []

    def work(peers: cgd.Peers) -> None:
        observers.append(RecordingObserver(peers))
        peers.sum(np.full(2, 1e9 if peers.me == "a" else 1.0))

    with cgd.local_peers(NAMES) as members, pytest.raises(RangeError):
        members.run(work)
    assert [len(observer.addends) for observer in observers if observer.peers.me == "a"] == [0]
    assert [observer.totals for observer in observers] == [[], [], []]


def test_sink_receives_every_frame_and_the_sum_is_unchanged() -> None:
    frames: dict[str, list[tuple[str, bytes]]] = {"a": [], "c": []}

    def append_to(received: list[tuple[str, bytes]]) -> FrameSink:
        return lambda sender, frame: received.append((sender, bytes(frame)))

    sinks = {name: append_to(received) for name, received in frames.items()}
    values = [np.linspace(-1, 1, 5000) * scale for scale in (1, 2, 3)]
    with cgd.local_peers(NAMES, sinks=sinks) as members:
        totals = members.run(lambda peers, own: peers.sum(own), values)
        counts = {peers.me: (peers.traffic.frames_received, peers.traffic.bytes_received) for peers in members}
    with cgd.local_peers(NAMES) as members:
        plain = members.run(lambda peers, own: peers.sum(own), values)
    assert all(np.array_equal(total, plain[0]) for total in totals)
    for name, received in frames.items():
        assert (len(received), sum(len(frame) for _, frame in received)) == counts[name]
        assert {sender for sender, _ in received} == set(NAMES) - {name}
        for sender, frame in received:
            from_bytes(frame, sender)  # raises FrameError if it is not a whole frame
