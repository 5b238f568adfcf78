"""A hub that alters, drops, reorders, repeats, swaps or adds wrongly is found out, and nothing is opened."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cgd.errors import HubError, PeerTimeoutError
from cgd.peers import SumSettings
from cgd.secagg import hub_aggregator, partition
from cgd.secagg.codec import Frame, from_bytes, to_bytes
from cgd.secagg.hub_aggregator import HubAggregator
from cgd.secagg.messages import HUB, Deposit, Total
from cgd.transport import channel
from cgd.transport.channel import PREFIX_BYTES
from support.hubs import EVERYONE, MEMBERS, BentHub, Town

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cgd.secagg.messages import Buffer, PeerId

    Passed = list[tuple[str, str, bytes]]

VALUES = {name: np.random.default_rng(ord(name)).normal(size=900).astype(np.float32) for name in MEMBERS}
MESH = SumSettings(opening="mesh")


@pytest.fixture
def town() -> Iterator[Town]:
    with Town(settings=MESH, hub=BentHub) as made:
        yield made


def bent(town: Town, bend: Callable[[str, str, bytes], Passed]) -> None:
    hub = town.start_hub()
    assert isinstance(hub, BentHub)
    hub.bend = bend


def from_the_twentieth(change: Callable[[str, str, bytes], Passed]) -> Callable[[str, str, bytes], Passed]:
    """Leave a to b's first messages alone, so that they are in the middle of something; the others are not touched.

    Handshakes do not count: there are many if b is late.
    """
    seen = 0

    def bend(sender: str, to: str, payload: bytes) -> Passed:
        nonlocal seen
        if (sender, to) != ("a", "b") or payload[5] != channel.PacketKind.TRANSPORT:
            return [(sender, to, payload)]
        seen += 1
        return [(sender, to, payload)] if seen != 20 else change(sender, to, payload)

    return bend


def altered(place: int) -> Callable[[str, str, bytes], Passed]:
    def change(sender: str, to: str, payload: bytes) -> Passed:
        content = bytearray(payload)
        content[place] ^= 1
        return [(sender, to, bytes(content))]

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (altered(-1), "the hub: altered a message from a: its seal is broken"),
        (altered(PREFIX_BYTES), "the hub: altered a message from a: its seal is broken"),
        (altered(26), "the hub: altered a message from a: its seal is broken"),
        (altered(5), "the hub: altered a message from a: its header is not what the sender wrote"),
        (lambda sender, to, payload: [(sender, to, payload[:30])], "the hub: altered .* truncated"),
        (lambda sender, to, payload: 2 * [(sender, to, payload)], "the hub: repeated or reordered messages from a"),
        (lambda _, to, payload: [("c", to, payload)], "swapped messages: .* as a message from c is one from a to b"),
        (lambda sender, _, payload: [(sender, "c", payload)], "swapped messages: .* is one from a to b"),
        (lambda sender, to, payload: [(to, sender, payload)], "swapped messages: .* is one from a to b"),
    ],
    ids=["body", "first of body", "count", "kind", "cut", "repeated", "sender", "recipient", "back"],
)
def test_what_a_hub_does_to_a_message_is_found_out(
    town: Town, change: Callable[[str, str, bytes], Passed], says: str
) -> None:
    bent(town, from_the_twentieth(change))
    town.start()
    lives = dict(town.lives)
    with pytest.raises(AssertionError, match=says):
        raise AssertionError(str(town.blamed(VALUES, count=1000)))
    assert all(len(life.membership.group(EVERYONE).journal) < 1000 for life in lives.values())


def test_messages_in_another_order_are_found_out(town: Town) -> None:
    waiting: Passed = []

    def bend(sender: str, to: str, payload: bytes) -> Passed:
        if (sender, to) == ("a", "b") and not waiting:
            waiting.append((sender, to, payload))
            return []
        return [(sender, to, payload), *waiting] if (sender, to) == ("a", "b") else [(sender, to, payload)]

    bent(town, bend)
    town.start()
    assert "repeated or reordered messages from a" in str(town.blamed(VALUES, count=1000))


def test_what_was_recorded_in_a_former_life_is_of_no_use(town: Town) -> None:
    """All that a said to b in its first life is passed on again in its second: it brings the hub no further."""
    recorded: Passed = []
    replay = False

    def bend(sender: str, to: str, payload: bytes) -> Passed:
        nonlocal replay
        if (sender, to) == ("a", "b") and not replay:
            recorded.append((sender, to, payload))
        again = recorded if replay and (sender, to) == ("a", "b") else []
        replay = replay and (sender, to) != ("a", "b")
        return [*again, (sender, to, payload)]

    bent(town, bend)
    town.start()
    totals, errors = town.sums(VALUES)
    assert not errors
    journals = {name: life.kill() for name, life in town.lives.items()}
    replay = True
    town.lives.clear()
    for name in MEMBERS:
        town.start(name, journals=journals[name])
    again, errors = town.sums(VALUES, count=3)
    assert not errors
    assert {each.tobytes() for each in again.values()} == {each.tobytes() for each in totals.values()}
    assert len(recorded) > 10
    replay = True  # and now within one life
    assert "repeated or reordered" in str(town.blamed(VALUES, count=1000))


def test_a_few_lost_messages_are_healed(town: Town) -> None:
    rng = random.Random(1)
    bent(town, lambda sender, to, payload: [(sender, to, payload)] if rng.random() > 0.02 else [])
    town.start()
    totals, errors = town.sums(VALUES, count=5)
    assert not errors
    assert len({total.tobytes() for total in totals.values()}) == 1


def test_a_hub_that_goes_on_losing_messages_is_told(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "MAX_LOSSES", 10)
    rng = random.Random(1)
    bent(town, lambda sender, to, payload: [(sender, to, payload)] if sender != "a" or rng.random() > 0.7 else [])
    town.start()
    with pytest.raises(AssertionError, match="the hub: loses messages from a: [0-9]+ so far, and it goes on"):
        raise AssertionError(str(town.blamed(VALUES, count=1000)))


def test_a_hub_that_drops_everything_is_where_it_hangs() -> None:
    with Town(settings=MESH, hub=BentHub, timeout=2.0) as town:
        bent(town, lambda sender, to, payload: [] if "a" in (sender, to) else [(sender, to, payload)])
        town.start()
        _, errors = town.sums(VALUES)
        assert all(isinstance(error, PeerTimeoutError) for error in errors.values())
        assert "a: no answer through the hub: it has just started, or the hub does not pass on" in str(errors["b"])


# What it adds up.


class TamperingAggregator(HubAggregator):
    """Changes what it takes in, or what it tells."""

    def __init__(
        self, groups: Any, take: Callable[[str, Deposit], Deposit | None], tell: Callable[[bytes], bytes]
    ) -> None:
        super().__init__(groups)
        self._take, self._tell = take, tell

    def receive(self, sender: PeerId, data: Buffer) -> tuple[frozenset[PeerId], bytes] | None:
        frame = from_bytes(data, sender)
        assert isinstance(frame.message, Deposit)
        taken = self._take(sender, frame.message)
        told = None
        if taken is not None:
            told = super().receive(sender, to_bytes(Frame(frame.session, frame.number, taken)))
        return None if told is None else (told[0], self._tell(told[1]))


def keep(_: str, deposit: Deposit) -> Deposit:
    return deposit


def tell_rightly(total: bytes) -> bytes:
    return total


def tell_wrongly(total: bytes) -> bytes:
    return total[:-1] + bytes([total[-1] ^ 0x80])


def take_doubled(sender: str, deposit: Deposit) -> Deposit:
    if sender != "a":
        return deposit
    return replace(deposit, words=(2 * np.frombuffer(deposit.words, dtype="<u4")).astype("<u4").tobytes())


def take_zeros(sender: str, deposit: Deposit) -> Deposit:
    return replace(deposit, words=bytes(len(deposit.words))) if sender == "c" else deposit


@pytest.mark.parametrize(
    ("take", "tell"), [(keep, tell_wrongly), (take_doubled, tell_rightly), (take_zeros, tell_rightly)]
)
def test_a_hub_that_adds_wrongly_is_found_out(
    take: Callable[[str, Deposit], Deposit | None], tell: Callable[[bytes], bytes]
) -> None:
    with Town() as town:
        hub = town.start_hub()
        town.start()
        assert not town.sums(VALUES)[1]
        lives = dict(town.lives)
        hub._aggregator = TamperingAggregator(town.federation_spec.groups, take, tell)
        fault = town.blamed(VALUES, count=1000)
        assert "does not fit its tags: the hub added wrongly, or altered what it was given" in str(fault)
        assert {len(life.membership.group(EVERYONE).journal) for life in lives.values()} == {
            1
        }  # nothing more was opened


def test_a_hub_that_swaps_groups_is_found_out() -> None:
    """It takes what one member deposited for everyone's sum for its part of the column's."""
    names = [f"r{row}c{column}" for row in range(3) for column in range(2)]
    column = [name for name in names if name.endswith("0")]
    recorded: dict[int, bytes] = {}

    def take(sender: str, deposit: Deposit) -> Deposit:
        if sender == "r1c0" and deposit.group == EVERYONE:
            recorded[deposit.start] = bytes(deposit.words)
        swapped = sender == "r1c0" and deposit.group == "column-0"
        return replace(deposit, words=recorded[deposit.start]) if swapped else deposit

    with Town(names, groups={EVERYONE: names, "column-0": column}) as town:
        hub = town.start_hub()
        town.start()
        hub._aggregator = TamperingAggregator(town.federation_spec.groups, take, tell_rightly)
        assert not town.sums({name: np.ones(9) for name in names})[1]
        _, errors = town.sums({name: np.ones(9) for name in column}, "column-0")
        assert set(errors) == set(column)
        assert any(isinstance(error, HubError) for error in errors.values())
        assert all("the hub" in str(error) for error in errors.values())


def test_a_hub_that_swaps_slices_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (partition, hub_aggregator):
        monkeypatch.setattr(module, "SLICE", 64)
    told: dict[int, Buffer] = {}

    def swap(total: bytes) -> bytes:
        frame = from_bytes(total, HUB)
        assert isinstance(frame.message, Total)
        told[frame.message.start] = frame.message.words
        words = told[0] if frame.message.start == 128 else frame.message.words
        return to_bytes(Frame(frame.session, frame.number, Total(frame.message.start, words)))

    with Town() as town:
        town.start_hub()._aggregator = TamperingAggregator(town.federation_spec.groups, keep, swap)
        town.start()
        assert "does not fit its tags" in str(town.blamed(VALUES))
