"""Through the hub: the same bits, whoever dials out; and whoever is killed, the hub as well, changes nothing."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zmq

from cgd import local_peers
from cgd.peers import SumSettings
from cgd.secagg.messages import HUB
from cgd.transport import hub as hub_module
from cgd.transport import link
from cgd.transport.link import Datagram, DatagramKind
from support.hubs import EVERYONE, MEMBERS, Town, Worker, addend, eventually
from support.ports import free_port

if TYPE_CHECKING:
    import numpy.typing as npt

    from cgd.secagg.messages import Opening, Sharing

pytestmark = pytest.mark.slow


def values(size: int = 700) -> dict[str, npt.NDArray[Any]]:
    return {name: np.random.default_rng(ord(name)).normal(size=size).astype(np.float32) for name in MEMBERS}


def direct(of: dict[str, npt.NDArray[Any]], ring_bits: int = 32) -> bytes:
    with local_peers(list(of), ring_bits=ring_bits) as colony:
        totals: list[bytes] = colony.run(lambda peers, own: peers.sum(own).tobytes(), list(of.values()))
    return totals[0]


@pytest.mark.parametrize(
    ("dialers", "opening", "sharing", "ring_bits"),
    [
        (MEMBERS, "hub", "expanded", 32),
        (MEMBERS, "hub", "uniform", 64),
        (MEMBERS, "mesh", "expanded", 64),
        (MEMBERS, "mesh", "uniform", 32),
        (MEMBERS, "aggregator", "expanded", 32),
        ((), "hub", "expanded", 64),
        (("a",), "hub", "expanded", 32),
        (("a", "b"), "mesh", "expanded", 32),
    ],
)
def test_the_bits_are_those_without_a_hub(
    dialers: tuple[str, ...], opening: Opening, sharing: Sharing, ring_bits: int
) -> None:
    settings = SumSettings(
        ring_bits=ring_bits, sharing=sharing, opening=opening, aggregator="b" if opening == "aggregator" else ""
    )
    with Town(dialers, settings) as town:
        town.start_hub()
        town.start()
        totals, errors = town.sums(values(), count=3)
    assert not errors
    assert {total.tobytes() for total in totals.values()} == {direct(values(), ring_bits)}


def test_many_slices_go_through_the_hub_whatever_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """More slices than may be deposited ahead, so that members have to wait for totals in between."""
    monkeypatch.setattr("cgd.secagg.partition.SLICE", 64)
    monkeypatch.setattr("cgd.secagg.hub_aggregator.SLICE", 64)
    monkeypatch.setattr("cgd.secagg.reduction.AHEAD", 4)
    monkeypatch.setattr("cgd.secagg.hub_aggregator.AHEAD", 4)
    with Town() as town:
        town.start_hub()
        town.start()
        totals, errors = town.sums(values(3000))
    assert not errors
    assert {total.tobytes() for total in totals.values()} == {direct(values(3000))}


def test_groups_sum_by_themselves() -> None:
    names = [f"r{row}c{column}" for row in range(3) for column in range(2)]
    columns = {f"column-{column}": [name for name in names if name.endswith(str(column))] for column in range(2)}
    of = {name: np.random.default_rng(i).normal(size=50) for i, name in enumerate(names)}
    with Town(names[:4], groups={EVERYONE: names, **columns}) as town:
        town.start_hub()
        town.start()
        totals, errors = town.sums(of)
        assert not errors
        assert {total.tobytes() for total in totals.values()} == {direct(of)}
        for group, members in columns.items():
            own = {name: of[name] for name in members}
            totals, errors = town.sums(own, group)
            assert not errors
            assert {total.tobytes() for total in totals.values()} == {direct(own)}


def expected(count: int) -> list[bytes]:
    def work(peers: Any) -> list[bytes]:
        return [peers.sum(addend(peers.me, number)).tobytes() for number in range(count)]

    with local_peers(MEMBERS) as colony:
        return colony.run(work)[0]


@pytest.mark.parametrize(
    ("dialers", "opening", "keep"), [(MEMBERS, "hub", True), (MEMBERS, "mesh", False), (("a",), "hub", False)]
)
def test_kills_at_random_moments_change_nothing(dialers: tuple[str, ...], opening: Opening, keep: bool) -> None:
    """The hub's own death included; nobody may take it for a fault of the hub's."""
    rng = random.Random(f"{opening} {keep}")
    count = 40
    with Town(dialers, SumSettings(opening=opening)) as town:
        workers = {name: Worker(town, name, count, slowly) for name in MEMBERS}
        for worker in workers.values():
            worker.begin()
        time.sleep(0.3)  # the hub is down at the start
        town.start_hub()
        for _ in range(8):
            time.sleep(rng.uniform(0, 0.5))
            victim = rng.choice((HUB, HUB, *MEMBERS))
            if victim == HUB:
                town.kill_hub()
                time.sleep(rng.uniform(0, 0.3))
                town.start_hub()
            else:
                journals = workers[victim].kill()
                workers[victim].begin(journals if keep else None)
        eventually(lambda: all(worker.done for worker in workers.values()), 120)
        errors = {name: worker.error for name, worker in workers.items() if worker.error is not None}
        assert not errors
        assert all(worker.totals == expected(count) for worker in workers.values())


def slowly(name: str, number: int) -> npt.NDArray[Any]:
    time.sleep(0.02)
    return addend(name, number)


def test_addresses_that_come_and_go_and_another_hub_disturb_nobody() -> None:
    """Ways are made anew in one life of a process; nobody takes that for a fault of the hub's."""
    with Town(("a", "b"), SumSettings(opening="mesh")) as town:
        town.start_hub()
        town.start()
        for change in ("c dials out", "c has an address", "another hub"):
            totals, errors = town.sums(values(), count=2)
            assert not errors, change
            assert {total.tobytes() for total in totals.values()} == {direct(values())}
            if change == "another hub":
                break
            town.contacts["c"] = replace(town.contacts["c"], address="" if change == "c dials out" else "tcp://x:1")
            for name in ("a", "b"):
                away = town.contacts | {"c": replace(town.contacts["c"], public_key=zmq.curve_keypair()[0])}
                town.lives[name].transport.update(away)  # what was there before is let go
                town.lives[name].transport.update(town.contacts)
        town.kill_hub()
        town.contacts[HUB] = replace(town.contacts[HUB], address=f"tcp://127.0.0.1:{free_port()}")
        town.start_hub()
        for life in town.lives.values():
            life.transport.update(town.contacts)
        totals, errors = town.sums(values(), count=2)
        assert not errors
        assert {total.tobytes() for total in totals.values()} == {direct(values())}


def test_whatever_is_thrown_at_the_hub_it_goes_on() -> None:
    """By a stranger, and by whoever has c's key; c itself is let in when the other one is gone."""
    with Town() as town:
        hub = town.start_hub()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        callers = []
        for pair in (town.pairs["c"], zmq.curve_keypair()):
            caller = context.socket(zmq.DEALER)
            caller.curve_serverkey = town.contacts[HUB].public_key
            caller.curve_publickey, caller.curve_secretkey = pair
            caller.connect(town.contacts[HUB].address)
            callers.append(caller)
        rng = random.Random(1)
        hello = Datagram(DatagramKind.HELLO, b"i" * 8, link.NOBODY, 0, b"c").to_bytes()
        false = Datagram(DatagramKind.HELLO, b"i" * 8, link.NOBODY, 0, b"a").to_bytes()
        for parts in ([b"", false], [b"", hello], [b""], [b"", b"", b""], [b"x", b""], [b"c", b"itself"], [b"a", b"x"]):
            callers[0].send_multipart(parts)
        for _ in range(300):
            callers[0].send_multipart([rng.choice([b"", b"a", b"b", b"\xff"]), rng.randbytes(rng.randrange(200))])
        callers[1].send_multipart([b"a", b"x"])
        counts = hub.rejections.counts
        eventually(lambda: counts.get(("c", "a malformed message"), 0) > 50 and counts.get(("c", "a message"), 0) > 50)
        eventually(lambda: ("a stranger", "a connection") in counts)
        assert ("c", "a false name") in counts
        context.destroy(linger=0)
        town.start()
        totals, errors = town.sums(values())
        assert not errors
        assert {total.tobytes() for total in totals.values()} == {direct(values())}
        assert hub.failure is None


def test_nothing_of_a_participant_is_kept_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "AHEAD", 2)
    with Town() as town:
        hub = town.start_hub()
        client = hub._clients["a"]
        client.out.offer(bytes(link.WINDOW - len(hub_module.AGAIN)))
        told = [client.tell(b"total") for _ in range(20)]
        assert told == [True] * 9 + [False] * 11
        hub._tell(["a"], b"total")
        assert hub.rejections.counts["a", "a total"] == 1
