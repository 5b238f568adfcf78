"""A hub that adds wrongly, or the deposits of other sums, is detected, and no sum is opened."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cgd.errors import HubError
from cgd.secagg import hub_aggregator, reduction
from cgd.secagg.codec import Frame, from_bytes, to_bytes
from cgd.secagg.hub_aggregator import HubAggregator
from cgd.secagg.messages import HUB, Deposit, Total
from support.hubs import EVERYONE, HubFederation
from support.transports import MEMBERS

if TYPE_CHECKING:
    from collections.abc import Callable

    from cgd.secagg.messages import Buffer, PeerId

    ChangeDeposit = Callable[[str, Deposit], Deposit]
    ChangeTotal = Callable[[bytes], bytes]

VALUES = {name: np.random.default_rng(ord(name)).normal(size=900).astype(np.float32) for name in MEMBERS}


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
        return None if finished is None else (finished[0], self._change_total(bytes(finished[1])))


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
