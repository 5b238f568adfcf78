"""Sums through the hub have the same bits as without it; participants and the hub can be killed at any time."""

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
from support.hubs import EVERYONE, HubFederation, RestartableProgram, random_addend
from support.ports import free_port
from support.transports import MEMBERS, eventually

if TYPE_CHECKING:
    import numpy.typing as npt

    from cgd.secagg.messages import Masking, Opening
    from support.hubs import Participant


def values(size: int = 700) -> dict[str, npt.NDArray[Any]]:
    return {name: np.random.default_rng(ord(name)).normal(size=size).astype(np.float32) for name in MEMBERS}


def total_without_hub(addends: dict[str, npt.NDArray[Any]], ring_bits: int = 32) -> bytes:
    with local_peers(list(addends), ring_bits=ring_bits) as members:
        totals: list[bytes] = members.run(lambda peers, own: peers.sum(own).tobytes(), list(addends.values()))
    return totals[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dialers", "opening", "masking", "ring_bits"),
    [
        (MEMBERS, "hub", "pairwise", 32),
        (MEMBERS, "hub", "uniform", 64),
        (MEMBERS, "mesh", "pairwise", 64),
        (MEMBERS, "mesh", "uniform", 32),
        (MEMBERS, "aggregator", "pairwise", 32),
        ((), "hub", "pairwise", 64),
        (("a",), "hub", "pairwise", 32),
        (("a", "b"), "mesh", "pairwise", 32),
    ],
)
def test_total_through_the_hub_equals_the_total_without_it(
    dialers: tuple[str, ...], opening: Opening, masking: Masking, ring_bits: int
) -> None:
    settings = SumSettings(
        ring_bits=ring_bits, masking=masking, opening=opening, aggregator="b" if opening == "aggregator" else ""
    )
    with HubFederation(dialers, settings) as federation:
        federation.start_hub()
        federation.start()
        totals, errors = federation.sums(values(), count=3)
    assert not errors
    assert {total.tobytes() for total in totals.values()} == {total_without_hub(values(), ring_bits)}


@pytest.mark.slow
def test_sum_of_many_slices_equals_the_sum_without_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are more slices than may be deposited ahead, so members have to wait for totals."""
    monkeypatch.setattr("cgd.secagg.reduction.SLICE_ELEMENTS", 64)
    monkeypatch.setattr("cgd.secagg.hub_aggregator.SLICE_ELEMENTS", 64)
    monkeypatch.setattr("cgd.secagg.reduction.MAX_SLICES_AHEAD", 4)
    monkeypatch.setattr("cgd.secagg.hub_aggregator.MAX_SLICES_AHEAD", 4)
    with HubFederation() as federation:
        federation.start_hub()
        federation.start()
        totals, errors = federation.sums(values(3000))
    assert not errors
    assert {total.tobytes() for total in totals.values()} == {total_without_hub(values(3000))}


@pytest.mark.slow
def test_groups_sum_independently() -> None:
    names = [f"r{row}c{column}" for row in range(3) for column in range(2)]
    columns = {f"column-{column}": [name for name in names if name.endswith(str(column))] for column in range(2)}
    addends = {name: np.random.default_rng(i).normal(size=50) for i, name in enumerate(names)}
    with HubFederation(names[:4], groups={EVERYONE: names, **columns}) as federation:
        federation.start_hub()
        federation.start()
        totals, errors = federation.sums(addends)
        assert not errors
        assert {total.tobytes() for total in totals.values()} == {total_without_hub(addends)}
        for group, members in columns.items():
            own = {name: addends[name] for name in members}
            totals, errors = federation.sums(own, group)
            assert not errors
            assert {total.tobytes() for total in totals.values()} == {total_without_hub(own)}


def expected_totals(count: int) -> list[bytes]:
    def work(peers: Any) -> list[bytes]:
        return [peers.sum(random_addend(peers.me, number)).tobytes() for number in range(count)]

    with local_peers(MEMBERS) as members:
        return members.run(work)[0]


def found_no_hub(participant: Participant) -> bool:
    return participant.transport.status()[HUB].problem.startswith("nobody answers there")


def slow_addend(name: str, number: int) -> npt.NDArray[Any]:
    time.sleep(0.02)
    return random_addend(name, number)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dialers", "opening", "keep_state"), [(MEMBERS, "hub", True), (MEMBERS, "mesh", False), (("a",), "hub", False)]
)
def test_kills_at_random_moments_change_no_total(dialers: tuple[str, ...], opening: Opening, keep_state: bool) -> None:
    """The hub is killed, too, and that must not be reported as tampering."""
    rng = random.Random(f"{opening} {keep_state}")
    count = 40
    with HubFederation(dialers, SumSettings(opening=opening)) as federation:
        programs = {name: RestartableProgram(federation, name, count, slow_addend) for name in MEMBERS}
        for program in programs.values():
            program.start()
        eventually(lambda: all(map(found_no_hub, federation.participants.values())))  # it is not running at the start
        federation.start_hub()
        for _ in range(8):
            time.sleep(rng.uniform(0, 0.5))
            killed = rng.choice((HUB, HUB, *MEMBERS))
            if killed == HUB:
                federation.kill_hub()
                time.sleep(rng.uniform(0, 0.3))
                federation.start_hub()
            else:
                journals = programs[killed].kill()
                programs[killed].start(journals if keep_state else None)
        eventually(lambda: all(program.done for program in programs.values()), 120)
        errors = {name: program.error for name, program in programs.items() if program.error is not None}
        assert not errors
        assert all(program.totals == expected_totals(count) for program in programs.values())


@pytest.mark.slow
def test_changes_of_addresses_and_of_the_hub_change_no_total() -> None:
    """Routes are created again in running processes, and that must not be reported as tampering."""
    with HubFederation(("a", "b"), SumSettings(opening="mesh")) as federation:
        federation.start_hub()
        federation.start()

        def check_sums(change: str) -> None:
            totals, errors = federation.sums(values(), count=2)
            assert not errors, change
            assert {total.tobytes() for total in totals.values()} == {total_without_hub(values())}

        check_sums("none")
        for change, address in (("c dials out", ""), ("c has an address", "tcp://x:1")):
            federation.contacts["c"] = replace(federation.contacts["c"], address=address)
            for name in ("a", "b"):
                transport = federation.participants[name].transport
                other_key = replace(federation.contacts["c"], public_key=zmq.curve_keypair()[0])
                transport.update(federation.contacts | {"c": other_key})  # closes the route to c
                transport.update(federation.contacts)
            check_sums(change)
        federation.kill_hub()
        federation.contacts[HUB] = replace(federation.contacts[HUB], address=f"tcp://127.0.0.1:{free_port()}")
        federation.start_hub()
        for participant in federation.participants.values():
            participant.transport.update(federation.contacts)
        check_sums("another hub")


def test_hub_continues_after_hostile_messages() -> None:
    """They come from an unknown client and from a process with c's key; c is accepted when that one has ended."""
    with HubFederation() as federation:
        hub = federation.start_hub()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        clients = []
        for pair in (federation.pairs["c"], zmq.curve_keypair()):
            client = context.socket(zmq.DEALER)
            client.curve_serverkey = federation.contacts[HUB].public_key
            client.curve_publickey, client.curve_secretkey = pair
            client.connect(federation.contacts[HUB].address)
            clients.append(client)
        rng = random.Random(1)
        hello, false_name = (
            Datagram(DatagramKind.HELLO, b"i" * 8, link.NO_INCARNATION, 0, name).to_bytes() for name in (b"c", b"a")
        )
        for parts in (
            *([b"", false_name], [b"", hello], [b""], [b"", b"", b""]),
            *([b"x", b""], [b"c", b"itself"], [b"a", b"x"]),
        ):
            clients[0].send_multipart(parts)
        for _ in range(300):
            clients[0].send_multipart([rng.choice([b"", b"a", b"b", b"\xff"]), rng.randbytes(rng.randrange(200))])
        clients[1].send_multipart([b"a", b"x"])
        counts = hub.rejections.counts
        eventually(lambda: counts.get(("c", "a malformed message"), 0) > 50 and counts.get(("c", "a message"), 0) > 50)
        eventually(lambda: ("an unknown client", "a connection") in counts)
        assert ("c", "a false name") in counts
        context.destroy(linger=0)
        federation.start()
        totals, errors = federation.sums(values())
        assert not errors
        assert {total.tobytes() for total in totals.values()} == {total_without_hub(values())}
        assert hub.failure is None


def test_queue_of_a_participant_that_does_not_read_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "MAX_SLICES_AHEAD", 2)
    with HubFederation() as federation:
        hub = federation.start_hub()
        client = hub._clients["a"]
        client.outbound.enqueue(bytes(link.WINDOW_BYTES - len(hub_module.RESEND_REQUEST)))
        accepted = [client.enqueue(b"total") for _ in range(20)]
        assert accepted == [True] * 9 + [False] * 11
        hub._send_total(["a"], b"total")
        assert hub.rejections.counts["a", "a total"] == 1
