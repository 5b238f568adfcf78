"""A hub that alters, drops, reorders, repeats or swaps messages changes no result, and it is reported.

A member can cause the same, so it ends no program.
"""

from __future__ import annotations

import random
import re
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import cgd
from cgd.errors import PeerTimeoutError
from cgd.peers import SumSettings
from cgd.transport import channel, zeromq
from cgd.transport.channel import HEADER_BYTES
from cgd.transport.routes import RelayedRoute
from support.hubs import EVERYONE, HubFederation, TamperingHub
from support.in_process import wait_until
from support.transports import DEADLINE_SECONDS, MEMBERS, eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from support.hubs import Relayed

    Tamper = Callable[[str, str, bytes], Relayed]

VALUES = {name: np.random.default_rng(ord(name)).normal(size=900).astype(np.float32) for name in MEMBERS}
MESH = SumSettings(opening="mesh")
NOTE = "messages that the hub relayed from it were altered, repeated or lost, by the hub or by itself"
MAX_MESSAGES_PER_SECOND = 50
MIN_MEASURED_SECONDS = 3  # a rate needs a window; a slow machine makes it longer


@pytest.fixture
def federation() -> Iterator[HubFederation]:
    with HubFederation(settings=MESH, hub=TamperingHub) as created:
        yield created


def start_tampering_hub(federation: HubFederation, tamper: Tamper) -> None:
    hub = federation.start_hub()
    assert isinstance(hub, TamperingHub)
    hub.tamper = tamper


def change_the_twentieth(change: Tamper) -> Tamper:
    """Change only the twentieth transport message from a to b, so that a session is in use.

    Handshakes do not count: there are many if b starts late.
    """
    seen = 0

    def tamper(sender: str, to: str, payload: bytes) -> Relayed:
        nonlocal seen
        if (sender, to) != ("a", "b") or payload[5] != channel.PacketKind.TRANSPORT:
            return [(sender, to, payload)]
        seen += 1
        return [(sender, to, payload)] if seen != 20 else change(sender, to, payload)

    return tamper


def alter(index: int) -> Tamper:
    def change(sender: str, to: str, payload: bytes) -> Relayed:
        content = bytearray(payload)
        content[index] ^= 1
        return [(sender, to, bytes(content))]

    return change


def refusals(federation: HubFederation) -> set[tuple[str, str, str]]:
    """Return the recipient, the sender and the kind of all relayed messages that were refused."""
    kinds = {"an altered message", "a swapped message", "a repeated or reordered message", "messages"}
    return {
        (name, sender, kind)
        for name, participant in federation.participants.items()
        for sender, kind in participant.transport.rejections.counts
        if kind in kinds
    }


def assert_sums_are_right(federation: HubFederation, count: int) -> None:
    """Assert that all members finish `count` sums, with the bits of a federation without a hub."""
    totals, errors = federation.sums(VALUES, count=count)
    assert not errors
    with cgd.local_peers(len(MEMBERS)) as members:
        undisturbed = members.run(lambda peers, values: peers.sum(values), list(VALUES.values()))
    assert {each.tobytes() for each in totals.values()} == {each.tobytes() for each in undisturbed}


@pytest.mark.parametrize(
    ("change", "refused", "reason"),
    [
        (alter(-1), ("b", "a", "an altered message"), "its authentication tag is wrong"),
        pytest.param(
            alter(HEADER_BYTES),
            ("b", "a", "an altered message"),
            "its authentication tag is wrong",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            alter(26), ("b", "a", "an altered message"), "its authentication tag is wrong", marks=pytest.mark.slow
        ),
        (alter(5), ("b", "a", "an altered message"), "its header is not what the sender wrote"),
        (
            lambda sender, to, payload: [(sender, to, payload[:30])],
            ("b", "a", "an altered message"),
            "it is truncated, or not encrypted at all",
        ),
        (
            lambda sender, to, payload: 2 * [(sender, to, payload)],
            ("b", "a", "a repeated or reordered message"),
            "it is not newer than the last one",
        ),
        (
            lambda _, to, payload: [("c", to, payload)],
            ("b", "c", "a swapped message"),
            "it is encrypted as one from a to b",
        ),
        (
            lambda sender, _, payload: [(sender, "c", payload)],
            ("c", "a", "a swapped message"),
            "it is encrypted as one from a to b",
        ),
        pytest.param(
            lambda sender, to, payload: [(to, sender, payload)],
            ("a", "b", "a swapped message"),
            "it is encrypted as one from a to b",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["body", "first of body", "sequence", "kind", "truncated", "repeated", "sender", "recipient", "back"],
)
def test_hub_that_changes_a_message_is_reported_and_changes_no_sum(
    federation: HubFederation,
    caplog: pytest.LogCaptureFixture,
    change: Tamper,
    refused: tuple[str, str, str],
    reason: str,
) -> None:
    start_tampering_hub(federation, change_the_twentieth(change))
    federation.start()
    assert_sums_are_right(federation, count=20)
    assert refusals(federation) == {refused}
    recipient, sender, kind = refused
    eventually(lambda: f"refused {kind} from {sender} ({reason}; the hub or {sender} has caused it)" in caplog.text)
    notes = {report.name: report.note for report in federation.participants[recipient].runtime.report()}
    assert notes[sender] == NOTE


def test_hub_that_reorders_messages_is_reported_and_changes_no_sum(federation: HubFederation) -> None:
    waiting: Relayed = []

    def tamper(sender: str, to: str, payload: bytes) -> Relayed:
        if (sender, to) == ("a", "b") and not waiting:
            waiting.append((sender, to, payload))
            return []
        return [(sender, to, payload), *waiting] if (sender, to) == ("a", "b") else [(sender, to, payload)]

    start_tampering_hub(federation, tamper)
    federation.start()
    assert_sums_are_right(federation, count=5)
    assert ("b", "a", "a repeated or reordered message") in refusals(federation)


def test_hub_that_tampers_in_every_way_changes_no_sum(federation: HubFederation) -> None:
    """It alters, drops, delays, repeats and swaps a tenth of all messages, handshakes included."""
    rng = random.Random(1)
    delayed: Relayed = []

    def tamper(sender: str, to: str, payload: bytes) -> Relayed:
        message = (sender, to, payload)
        match rng.randrange(50):
            case 0:
                return alter(rng.randrange(len(payload)))(*message)
            case 1:
                return []
            case 2:
                delayed.append(message)
                return []
            case 3:
                return 2 * [message]
            case 4:
                return [(to, sender, payload)]
            case _:
                late, delayed[:] = delayed[:], []
                return [message, *late]

    start_tampering_hub(federation, tamper)
    federation.start()
    assert_sums_are_right(federation, count=10)
    assert {kind for *_, kind in refusals(federation)} >= {
        "an altered message",
        "a swapped message",
        "a repeated or reordered message",
    }


@pytest.mark.slow
@pytest.mark.parametrize("min_bytes", [0, 500], ids=["everything", "shares"])
def test_altered_messages_are_sent_again_at_a_limited_rate(federation: HubFederation, min_bytes: int) -> None:
    """The transport messages from a to b, or only the long ones, are altered for some seconds."""
    relayed, altering = 0, True

    def tamper(sender: str, to: str, payload: bytes) -> Relayed:
        nonlocal relayed
        if (sender, to) != ("a", "b") or payload[5] != channel.PacketKind.TRANSPORT:
            return [(sender, to, payload)]
        relayed += 1
        return alter(-1)(sender, to, payload) if altering and len(payload) >= min_bytes else [(sender, to, payload)]

    start_tampering_hub(federation, tamper)
    federation.start()
    totals: dict[str, Any] = {}
    errors: dict[str, BaseException] = {}
    threads = federation._start_sums(VALUES, EVERYONE, 1, totals, errors)
    begun, b = time.monotonic(), federation.participants["b"]
    time.sleep(MIN_MEASURED_SECONDS)
    wait_until(lambda: ("a", NOTE) in {(report.name, report.note) for report in b.runtime.report()})
    assert not totals
    assert not errors
    assert 0 < relayed < (time.monotonic() - begun) * MAX_MESSAGES_PER_SECOND
    altering = False
    for thread in threads:
        thread.join(DEADLINE_SECONDS)
    assert len(totals) == len(MEMBERS)
    assert len({each.tobytes() for each in totals.values()}) == 1


@pytest.mark.parametrize("kind", ["garbage", "swapped", "repeated", "gaps"])
def test_no_packet_of_a_member_ends_the_program_of_another(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """The hub is honest. It cannot check what it relays, and the fingerprints of all pairs are public."""
    with HubFederation(settings=MESH) as federation:
        federation.start_hub()
        federation.start()
        assert_sums_are_right(federation, count=1)
        route = federation.participants["c"].transport._routes["a"]
        assert isinstance(route, RelayedRoute)
        process, connection = route.channel.process, route._hub.connection.number
        for _ in range(200):
            sealed = route.channel.seal(b"", process, connection) or b""
            if kind == "garbage":
                route._send(b"garbage")
            elif kind == "swapped":
                fingerprint = route.channel._factory.fingerprint("b", "a")
                route._send(channel._header(channel.PacketKind.FIRST, fingerprint, bytes(8)) + bytes(64))
            elif kind == "repeated":
                route._send(sealed, sealed)
            else:
                for _ in range(channel.MAX_GAP_PENALTY):
                    sealed = route.channel.seal(b"", process, connection) or b""
                route._send(sealed)
        kinds = {"garbage": "an altered message", "swapped": "a swapped message", "gaps": "messages"}
        expected = ("a", "c", kinds.get(kind, "a repeated or reordered message"))
        eventually(lambda: expected in refusals(federation))
        assert_sums_are_right(federation, count=3)
        assert caplog.text.count("the hub or c") == 1  # of 200: the log is limited


def test_messages_recorded_before_a_restart_have_no_effect_after_it(federation: HubFederation) -> None:
    """The hub relays all earlier messages from a to b once more after all participants have restarted."""
    recorded: Relayed = []
    replay = False

    def tamper(sender: str, to: str, payload: bytes) -> Relayed:
        nonlocal replay
        if (sender, to) == ("a", "b") and not replay:
            recorded.append((sender, to, payload))
        again = recorded if replay and (sender, to) == ("a", "b") else []
        replay = replay and (sender, to) != ("a", "b")
        return [*again, (sender, to, payload)]

    start_tampering_hub(federation, tamper)
    federation.start()
    totals, errors = federation.sums(VALUES)
    assert not errors
    journals = {name: participant.kill() for name, participant in federation.participants.items()}
    replay = True
    federation.participants.clear()
    for name in MEMBERS:
        federation.start(name, journals=journals[name])
    again, errors = federation.sums(VALUES, count=3)
    assert not errors
    assert {each.tobytes() for each in again.values()} == {each.tobytes() for each in totals.values()}
    assert len(recorded) > 10
    replay = True  # and now without a restart
    assert_sums_are_right(federation, count=5)
    assert ("b", "a", "a repeated or reordered message") in refusals(federation)


def test_few_lost_messages_are_retransmitted(federation: HubFederation) -> None:
    rng = random.Random(1)
    start_tampering_hub(federation, lambda sender, to, payload: [(sender, to, payload)] if rng.random() > 0.02 else [])
    federation.start()
    totals, errors = federation.sums(VALUES, count=5)
    assert not errors
    assert len({total.tobytes() for total in totals.values()}) == 1


@pytest.mark.slow
def test_hub_that_continues_to_lose_messages_is_reported(
    federation: HubFederation, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(channel, "MAX_LOSS_PENALTY", 10)
    rng = random.Random(1)

    def is_reported() -> bool:
        report = r"missed messages from a \([0-9]+ so far, and it continues; the hub or a causes it\)"
        return re.search(report, caplog.text) is not None

    def lose_half_of_a(sender: str, to: str, payload: bytes) -> Relayed:
        return [(sender, to, payload)] if sender != "a" or rng.random() > 0.5 or is_reported() else []

    start_tampering_hub(federation, lose_half_of_a)
    federation.start()
    assert_sums_are_right(federation, count=2)
    assert is_reported()


@pytest.mark.slow
def test_timeout_reports_that_the_hub_does_not_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zeromq, "CLOSE_SECONDS", 0.1)  # what the hub drops cannot be delivered

    def drop_messages_of_a(sender: str, to: str, payload: bytes) -> Relayed:
        return [] if "a" in (sender, to) else [(sender, to, payload)]

    with HubFederation(settings=MESH, hub=TamperingHub, timeout=2.0) as federation:
        start_tampering_hub(federation, drop_messages_of_a)
        federation.start()
        _, errors = federation.sums(VALUES)
        assert all(isinstance(error, PeerTimeoutError) for error in errors.values())
        reason = "a: no answer through the hub: it has just started, or the hub does not relay our messages"
        assert reason in str(errors["b"])
