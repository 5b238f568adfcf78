"""Sums that the program no longer waits for, after a timeout or Ctrl-C."""

from __future__ import annotations

import json
import signal
import threading
from typing import Any

import numpy as np
import pytest

from cgd.errors import (
    LocalProtocolError,
    PeerTimeoutError,
)
from cgd.federation.state import StateFolder
from support.in_process import (
    DEADLINE_SECONDS,
    FEDERATION,
    InProcessFederation,
    MemberProcess,
    wait_until,
)
from support.programs import (
    EVERYONE,
    Summing,
    idle,
)

pytestmark = pytest.mark.slow


@pytest.fixture
def waiting(federation: InProcessFederation) -> InProcessFederation:
    """The test makes the sums of ada; bob waits in its first sum, and cleo pauses before its first sum."""
    federation.start("ada", idle, timeout=DEADLINE_SECONDS)
    federation.start("bob", Summing([1, 2, 3]))
    federation.start("cleo", Summing([1, 2, 3]), pause_at=0)
    federation.wait_until(lambda: federation["bob"].is_waiting_for("Ready", "ada", "cleo"))
    federation.wait_until(lambda: federation["ada"].member.runtime.membership.up_to_date)
    return federation


def time_out(process: MemberProcess, values: Any) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(PeerTimeoutError) as caught:
        patch.setattr(process.member.runtime, "_timeout", 0.2)
        process.peers.sum(values)
    assert caught.value.peers == {"cleo"}


def interrupt(process: MemberProcess, values: Any) -> None:
    """Interrupt the sum, as by Ctrl-C in a notebook."""

    def press() -> None:
        wait_until(in_the_sum)
        signal.pthread_kill(main, signal.SIGINT)

    def in_the_sum() -> bool:
        with process.member.runtime.locked() as membership:  # the sum holds this lock except while it waits
            pending = membership.group(EVERYONE).pending
            return pending is not None and not pending.abandoned

    main = threading.get_ident()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=press)
    try:
        with pytest.raises(KeyboardInterrupt):
            thread.start()
            process.peers.sum(values)
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)


abandonments = pytest.mark.parametrize("abandon", [time_out, interrupt])


@abandonments
def test_abandoned_sum_continues_and_is_returned_later(waiting: InProcessFederation, abandon: Any) -> None:
    ada, values = waiting["ada"], np.array([1])
    abandon(ada, values)
    values[0] = 1000  # the values that may have been shared count
    waiting["cleo"].resume()
    waiting.wait_until(lambda: len(ada.journal()) == 1)
    assert [ada.peers.sum(values).item(), *(ada.peers.sum(np.array([k])).item() for k in (2, 3))] == [3, 6, 9]
    waiting.errors("bob", "cleo")
    assert [waiting[name].result for name in ("bob", "cleo")] == [(3, 6, 9)] * 2


@abandonments
def test_abandoned_sum_may_be_requested_again_while_it_runs(waiting: InProcessFederation, abandon: Any) -> None:
    ada, values = waiting["ada"], np.array([1])
    for _ in range(2):
        abandon(ada, values)
    waiting["cleo"].resume()
    assert [ada.peers.sum(np.array([k])).item() for k in (1, 2, 3)] == [3, 6, 9]


def test_abandoned_sum_restarts_with_its_original_values(waiting: InProcessFederation) -> None:
    """Cleo is killed and restarted: in the new view, ada shares the values that it may have shared in the old one."""
    ada, values = waiting["ada"], np.array([1])
    time_out(ada, values)
    values[0] = 1000
    waiting.kill("cleo")
    waiting.start("cleo", Summing([1]))
    waiting.wait_until(lambda: len(ada.journal()) == 1)
    assert ada.peers.sum(values).item() == 3


def test_other_sum_is_rejected_while_an_abandoned_one_runs(waiting: InProcessFederation) -> None:
    ada = waiting["ada"]
    time_out(ada, np.array([1]))
    with pytest.raises(LocalProtocolError, match="a sum is still running"):
        ada.peers.sum(np.array([1, 2]))
    waiting["cleo"].resume()
    waiting.wait_until(lambda: len(ada.journal()) == 1)
    assert ada.peers.sum(np.array([1])).item() == 3


def test_interrupt_while_a_total_is_saved_loses_nothing(
    federation: InProcessFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by Ctrl-C while the disk is slow."""
    append = StateFolder.append
    interrupts = [True]

    def interrupted_append(folder: StateFolder, group: str, place: int, entry: Any) -> None:
        is_mark = isinstance(json.loads(bytes(entry[1])), dict)
        if folder.folder.name == "ada" and not is_mark and interrupts and interrupts.pop():
            raise KeyboardInterrupt
        append(folder, group, place, entry)

    monkeypatch.setattr(StateFolder, "append", interrupted_append)
    ada = federation.start("ada", idle, timeout=DEADLINE_SECONDS)
    federation.start("bob", Summing([1, 2, 3]))
    federation.start("cleo", Summing([1, 2, 3]))
    with pytest.raises(KeyboardInterrupt):
        ada.peers.sum(np.array([1]))
    assert [ada.peers.sum(np.array([k])).item() for k in (1, 2, 3)] == [3, 6, 9]
    federation.kill("ada")
    assert len(StateFolder(federation.folder("ada"), FEDERATION).load()[EVERYONE]) == 3
