"""What is handed on of sums and frames: everything, in the right moment, and nothing is changed by it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import cgd
from cgd.errors import InputError, RangeError
from cgd.secagg.codec import from_bytes
from cgd.secagg.journal import Step

if TYPE_CHECKING:
    import numpy.typing as npt

    from cgd.transport.tap import Addend, Sink

NAMES = ("a", "b", "c")


class Notes:
    """An observer that keeps all it sees, and how much had been sent by then."""

    def __init__(self, peers: cgd.Peers) -> None:
        self.peers = peers
        self.entered: list[tuple[Addend, int]] = []
        self.totals: list[tuple[Addend, npt.NDArray[Any]]] = []
        peers.observer = self

    def entering(self, addend: Addend) -> None:
        self.entered.append((addend, self.peers.traffic.frames_sent))

    def opened(self, addend: Addend, total: npt.NDArray[Any]) -> None:
        self.totals.append((addend, total.copy()))


def test_an_observer_sees_what_goes_in_before_anything_leaves_and_what_comes_out() -> None:
    values = [np.array([1.5, -2.0]), np.array([0.25, 1.0]), np.array([4.0, 0.0])]
    weights = [0.5, 0.25, 0.25]

    def work(peers: cgd.Peers, own: npt.NDArray[Any], weight: float) -> tuple[Notes, npt.NDArray[Any]]:
        notes = Notes(peers)
        return notes, peers.sum(own, weight=weight, context="trial", step=Step(0, 7))

    with cgd.local_peers(NAMES) as colony:
        results = colony.run(work, values, weights)
    for (notes, total), own, weight in zip(results, values, weights, strict=True):
        ((addend, sent),) = notes.entered
        assert np.array_equal(addend.values, own)
        assert (addend.weight, addend.context, addend.step) == (weight, "trial", Step(0, 7))
        assert (addend.members, addend.epoch, sent) == (NAMES, 0, 0)
        ((after, opened),) = notes.totals
        assert after is addend
        assert np.array_equal(opened, total)


def test_nothing_is_put_into_a_sum_of_the_past(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who comes back is told the total; what its program says this time does not count."""

    def work(peers: cgd.Peers) -> Notes:
        notes = Notes(peers)
        monkeypatch.setattr(peers.memory, "past", lambda: True)
        peers.sum(np.ones(2))
        monkeypatch.setattr(peers.memory, "past", lambda: False)
        peers.sum(np.ones(2))
        return notes

    with cgd.local_peers(NAMES) as colony:
        for notes in colony.run(work):
            assert (len(notes.entered), len(notes.totals)) == (1, 2)


def test_what_an_observer_cannot_keep_does_not_leave() -> None:
    class Full(Notes):
        def entering(self, addend: Addend) -> None:
            raise InputError("the disk is full; make room")

    def work(peers: cgd.Peers) -> None:
        if peers.me == "b":
            Full(peers)
        peers.sum(np.ones(3))

    with cgd.local_peers(NAMES) as colony:
        with pytest.raises(InputError, match="the disk is full") as caught:
            colony.run(work)
        assert caught.value.__notes__ == ["This was raised at member b."]
        assert all(peers.traffic.sums == 0 for peers in colony)


def test_what_does_not_fit_is_refused_before_an_observer_sees_it() -> None:
    seen: list[Notes] = []

    def work(peers: cgd.Peers) -> None:
        seen.append(Notes(peers))
        peers.sum(np.full(2, 1e9 if peers.me == "a" else 1.0))

    with cgd.local_peers(NAMES) as colony, pytest.raises(RangeError):
        colony.run(work)
    assert [len(notes.entered) for notes in seen if notes.peers.me == "a"] == [0]
    assert [notes.totals for notes in seen] == [[], [], []]


def test_a_sink_gets_every_frame_and_the_sum_is_the_same() -> None:
    frames: dict[str, list[tuple[str, bytes]]] = {"a": [], "c": []}

    def keeping(kept: list[tuple[str, bytes]]) -> Sink:
        return lambda sender, frame: kept.append((sender, bytes(frame)))

    sinks = {name: keeping(kept) for name, kept in frames.items()}
    values = [np.linspace(-1, 1, 5000) * scale for scale in (1, 2, 3)]
    with cgd.local_peers(NAMES, sinks=sinks) as colony:
        totals = colony.run(lambda peers, own: peers.sum(own), values)
        counts = {peers.me: (peers.traffic.frames_received, peers.traffic.bytes_received) for peers in colony}
    with cgd.local_peers(NAMES) as colony:
        plain = colony.run(lambda peers, own: peers.sum(own), values)
    assert all(np.array_equal(total, plain[0]) for total in totals)
    for name, kept in frames.items():
        assert (len(kept), sum(len(frame) for _, frame in kept)) == counts[name]
        assert {sender for sender, _ in kept} == set(NAMES) - {name}
        for sender, frame in kept:
            from_bytes(frame, sender)  # whole frames
