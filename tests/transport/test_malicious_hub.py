"""A hub that alters, drops, reorders, repeats or swaps messages, or adds wrongly, is detected; no sum is opened."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cgd.errors import HubError, PeerTimeoutError
from cgd.peers import SumSettings
from cgd.secagg import hub_aggregator, reduction
from cgd.secagg.codec import Frame, from_bytes, to_bytes
from cgd.secagg.hub_aggregator import HubAggregator
from cgd.secagg.messages import HUB, Deposit, Total
from cgd.transport import channel
from cgd.transport.channel import HEADER_BYTES
from support.hubs import EVERYONE, HubFederation, TamperingHub
from support.transports import MEMBERS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cgd.secagg.messages import Buffer, PeerId
    from support.hubs import Relayed

    Tamper = Callable[[str, str, bytes], Relayed]
    ChangeDeposit = Callable[[str, Deposit], Deposit]
    ChangeTotal = Callable[[bytes], bytes]

VALUES = {name: np.random.default_rng(ord(name)).normal(size=900).astype(np.float32) for name in MEMBERS}
MESH = SumSettings(opening="mesh")


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (alter(-1), "the hub: altered a message from a: its authentication tag is wrong"),
        (alter(HEADER_BYTES), "the hub: altered a message from a: its authentication tag is wrong"),
        (alter(26), "the hub: altered a message from a: its authentication tag is wrong"),
        (alter(5), "the hub: altered a message from a: its header is not what the sender wrote"),
        (lambda sender, to, payload: [(sender, to, payload[:30])], "the hub: altered .* truncated"),
        (lambda sender, to, payload: 2 * [(sender, to, payload)], "the hub: repeated or reordered messages from a"),
        (lambda _, to, payload: [("c", to, payload)], "swapped messages: .* from a to b as one from c to us"),
        (lambda sender, _, payload: [(sender, "c", payload)], "swapped messages: .* from a to b as one from a to us"),
        (lambda sender, to, payload: [(to, sender, payload)], "swapped messages: .* from a to b as one from b to us"),
    ],
    ids=["body", "first of body", "sequence", "kind", "truncated", "repeated", "sender", "recipient", "back"],
)
def test_hub_that_changes_a_message_is_detected(federation: HubFederation, change: Tamper, message: str) -> None:
    start_tampering_hub(federation, change_the_twentieth(change))
    federation.start()
    participants = dict(federation.participants)
    with pytest.raises(HubError, match=message):
        raise federation.sum_until_hub_fault(VALUES, count=1000)
    assert all(len(each.membership.group(EVERYONE).journal) < 1000 for each in participants.values())


def test_hub_that_reorders_messages_is_detected(federation: HubFederation) -> None:
    waiting: Relayed = []

    def tamper(sender: str, to: str, payload: bytes) -> Relayed:
        if (sender, to) == ("a", "b") and not waiting:
            waiting.append((sender, to, payload))
            return []
        return [(sender, to, payload), *waiting] if (sender, to) == ("a", "b") else [(sender, to, payload)]

    start_tampering_hub(federation, tamper)
    federation.start()
    assert "repeated or reordered messages from a" in str(federation.sum_until_hub_fault(VALUES, count=1000))


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
    assert "repeated or reordered" in str(federation.sum_until_hub_fault(VALUES, count=1000))


def test_few_lost_messages_are_retransmitted(federation: HubFederation) -> None:
    rng = random.Random(1)
    start_tampering_hub(federation, lambda sender, to, payload: [(sender, to, payload)] if rng.random() > 0.02 else [])
    federation.start()
    totals, errors = federation.sums(VALUES, count=5)
    assert not errors
    assert len({total.tobytes() for total in totals.values()}) == 1


def test_hub_that_continues_to_lose_messages_is_detected(
    federation: HubFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "MAX_LOSS_PENALTY", 10)
    rng = random.Random(1)

    def lose_most_of_a(sender: str, to: str, payload: bytes) -> Relayed:
        return [(sender, to, payload)] if sender != "a" or rng.random() > 0.7 else []

    start_tampering_hub(federation, lose_most_of_a)
    federation.start()
    with pytest.raises(HubError, match="the hub: loses messages from a: [0-9]+ so far, and it continues"):
        raise federation.sum_until_hub_fault(VALUES, count=1000)


def test_timeout_reports_that_the_hub_does_not_relay() -> None:
    def drop_messages_of_a(sender: str, to: str, payload: bytes) -> Relayed:
        return [] if "a" in (sender, to) else [(sender, to, payload)]

    with HubFederation(settings=MESH, hub=TamperingHub, timeout=2.0) as federation:
        start_tampering_hub(federation, drop_messages_of_a)
        federation.start()
        _, errors = federation.sums(VALUES)
        assert all(isinstance(error, PeerTimeoutError) for error in errors.values())
        reason = "a: no answer through the hub: it has just started, or the hub does not relay our messages"
        assert reason in str(errors["b"])


# Addition by the hub.


class TamperingAggregator(HubAggregator):
    """Changes the deposits or the totals."""

    def __init__(self, groups: Any, change_deposit: ChangeDeposit, change_total: ChangeTotal) -> None:
        super().__init__(groups)
        self._change_deposit, self._change_total = change_deposit, change_total

    def receive(self, sender: PeerId, data: Buffer) -> tuple[frozenset[PeerId], bytes] | None:
        frame = from_bytes(data, sender)
        assert isinstance(frame.message, Deposit)
        deposit = self._change_deposit(sender, frame.message)
        finished = super().receive(sender, to_bytes(Frame(frame.session, frame.number, deposit)))
        return None if finished is None else (finished[0], self._change_total(finished[1]))


def honest_deposit(_: str, deposit: Deposit) -> Deposit:
    return deposit


def honest_total(total: bytes) -> bytes:
    return total


def flip_highest_bit(total: bytes) -> bytes:
    return total[:-1] + bytes([total[-1] ^ 0x80])


def double_deposit_of_a(sender: str, deposit: Deposit) -> Deposit:
    if sender != "a":
        return deposit
    return replace(deposit, words=(2 * np.frombuffer(deposit.words, dtype="<u4")).astype("<u4").tobytes())


def zero_deposit_of_c(sender: str, deposit: Deposit) -> Deposit:
    return replace(deposit, words=bytes(len(deposit.words))) if sender == "c" else deposit


@pytest.mark.parametrize(
    ("change_deposit", "change_total"),
    [(honest_deposit, flip_highest_bit), (double_deposit_of_a, honest_total), (zero_deposit_of_c, honest_total)],
)
def test_hub_that_adds_wrongly_is_detected(change_deposit: ChangeDeposit, change_total: ChangeTotal) -> None:
    with HubFederation() as federation:
        hub = federation.start_hub()
        federation.start()
        assert not federation.sums(VALUES)[1]
        participants = dict(federation.participants)
        hub._aggregator = TamperingAggregator(federation.spec.groups, change_deposit, change_total)
        fault = federation.sum_until_hub_fault(VALUES, count=1000)
        assert "does not match its MAC tags: the hub added wrongly or altered the deposits" in str(fault)
        lengths = {len(each.membership.group(EVERYONE).journal) for each in participants.values()}
        assert lengths == {1}  # no further sum was opened


def test_hub_that_swaps_groups_is_detected() -> None:
    """It adds a member's deposit for the sum of everyone to the sum of its column."""
    names = [f"r{row}c{column}" for row in range(3) for column in range(2)]
    column = [name for name in names if name.endswith("0")]
    recorded: dict[int, bytes] = {}

    def swap(sender: str, deposit: Deposit) -> Deposit:
        if sender == "r1c0" and deposit.group == EVERYONE:
            recorded[deposit.start] = bytes(deposit.words)
        swapped = sender == "r1c0" and deposit.group == "column-0"
        return replace(deposit, words=recorded[deposit.start]) if swapped else deposit

    with HubFederation(names, groups={EVERYONE: names, "column-0": column}) as federation:
        hub = federation.start_hub()
        federation.start()
        hub._aggregator = TamperingAggregator(federation.spec.groups, swap, honest_total)
        assert not federation.sums({name: np.ones(9) for name in names})[1]
        _, errors = federation.sums({name: np.ones(9) for name in column}, "column-0")
        assert set(errors) == set(column)
        assert any(isinstance(error, HubError) for error in errors.values())
        assert all("the hub" in str(error) for error in errors.values())


def test_hub_that_swaps_slices_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (reduction, hub_aggregator):
        monkeypatch.setattr(module, "SLICE_ELEMENTS", 64)
    slices: dict[int, Buffer] = {}

    def swap(total: bytes) -> bytes:
        frame = from_bytes(total, HUB)
        assert isinstance(frame.message, Total)
        slices[frame.message.start] = frame.message.words
        words = slices[0] if frame.message.start == 128 else frame.message.words
        return to_bytes(Frame(frame.session, frame.number, Total(frame.message.start, words)))

    with HubFederation() as federation:
        federation.start_hub()._aggregator = TamperingAggregator(federation.spec.groups, honest_deposit, swap)
        federation.start()
        assert "does not match its MAC tags" in str(federation.sum_until_hub_fault(VALUES))
