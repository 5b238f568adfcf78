"""Reminders of missing peers, and the remedy after a timeout."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from cgd.transport.state_log import PeerReport
from cgd.transport.waiting import COMPUTING, INTERVAL_SECONDS, Wait, reason, remedy

NOON = datetime(2026, 11, 18, 12, 0, tzinfo=UTC)
MISSING = PeerReport("b", "missing", "nobody answers there (tcp://b:7001)", since=NOON)
HERE = PeerReport("b", "here", since=NOON)


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def local(self) -> datetime:
        return NOON + timedelta(seconds=self.seconds)


def reminders(report: PeerReport, what: str = "Ready", seconds: int = 1000) -> dict[int, str]:
    """Return the reminders of a wait by their second."""
    clock = Clock()
    wait = Wait(clock, clock.local)
    found = {}
    for second in range(seconds):
        clock.seconds = second
        if wait.reminder_is_due() and (text := wait.reminder([report], {"b"}, what)):
            found[second] = text
    return found


def test_reminders_become_rarer_and_never_end() -> None:
    found = reminders(MISSING, seconds=1300)
    assert list(found) == [30, 60, 120, 300, 600, 900, 1200]
    assert found[60] == (
        "12:01:00 UTC, waiting since 12:00:00 for b: not here yet: nobody answers there (tcp://b:7001)"
    )


def test_peer_that_computes_is_mentioned_rarely() -> None:
    assert list(reminders(HERE, seconds=1300)) == [300, 600, 900, 1200]


def test_reminder_after_a_pause_of_the_machine_is_one() -> None:
    clock = Clock()
    wait = Wait(clock, clock.local)
    clock.seconds = 100 * INTERVAL_SECONDS + 1
    assert wait.reminder_is_due()
    assert not wait.reminder_is_due()
    assert "waiting since 12:00:00 for" in wait.reminder([MISSING], {"b"}, "its hello")
    clock.seconds += 86400
    assert "waiting since 2026-11-18 12:00:00 for" in wait.reminder([MISSING], {"b"}, "its hello")
    clock.seconds = 101 * INTERVAL_SECONDS
    assert wait.reminder_is_due()


def test_reminder_names_missing_peers_that_have_sent_their_part_and_no_others() -> None:
    clock = Clock()
    wait = Wait(clock, clock.local)
    reports = [MISSING, PeerReport("c", "here"), PeerReport("d", "here"), PeerReport("e", "done")]
    text = wait.reminder(reports, {"c"}, "Ready")
    assert text == f"12:00:00 UTC, waiting since 12:00:00 for b: {reason(MISSING, '', NOON)}; c: {COMPUTING}"
    assert wait.reminder(reports[1:], {"c"}, "Ready") == ""


@pytest.mark.parametrize(
    ("report", "what", "expected"),
    [
        (PeerReport("b", "missing", "x", since=NOON), "its hello", "not here yet: x"),
        (PeerReport("b", "missing", "x", since=NOON, seen=True), "Ready", "missing since 12:00:00, was here before: x"),
        (PeerReport("b", "left", "x", since=NOON, seen=True), "Ready", "at 12:00:00 x"),
        (PeerReport("b", "refused", "epoch", since=NOON), "its hello", "refused since 12:00:00: epoch"),
        (PeerReport("b", "here", "one way", since=NOON), "Ready", "one way"),
        (PeerReport("b", "here", since=NOON), "Ready", COMPUTING),
        (PeerReport("b", "here", since=NOON), "its journal", "connected; we wait for its journal"),
    ],
)
def test_reason_is_what_is_known(report: PeerReport, what: str, expected: str) -> None:
    assert reason(report, what, NOON + timedelta(minutes=5)) == expected


@pytest.mark.parametrize(
    ("report", "what", "helps"),
    [
        (HERE, "Ready", True),
        (HERE, "its journal", True),
        (HERE, "Share", False),
        (HERE, "its report", False),
        (PeerReport("b", "here", "we reach it, and it does not reach us"), "Ready", False),
        (MISSING, "its hello", False),
        (PeerReport("b", "missing", seen=True), "Ready", False),
        (PeerReport("b", "left"), "Ready", False),
        (PeerReport("b", "refused", "its file has epoch 1"), "its hello", False),
    ],
)
def test_longer_timeout_is_recommended_only_for_programs_that_may_be_slow(
    report: PeerReport, what: str, helps: bool
) -> None:
    text = remedy([report, PeerReport("c", "here")], {"b"}, what)
    assert ("raise the timeout" in text) is helps
    if report.absent or report.note:
        assert "b" in text.replace(",", "").split()
    assert "raise" not in remedy([MISSING, PeerReport("c", "here")], {"b", "c"}, "Ready")  # one of both is missing
