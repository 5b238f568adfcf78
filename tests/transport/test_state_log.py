from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from cgd.transport.base import SETTLE_SECONDS
from cgd.transport.state_log import MAX_LINES_AT_ONCE, SECONDS_BETWEEN_LINES, PeerReport, StateHistory, StateLog

if TYPE_CHECKING:
    import pytest


def test_changes_are_logged_at_a_limited_rate_and_the_last_one_always(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cgd")
    now = 0.0
    states = StateLog(lambda: now)
    for number in range(1000):
        now += SECONDS_BETWEEN_LINES / 100
        states.add([PeerReport("b", "refused", f"note {number}"), PeerReport("c", "here")])
    assert len([line for line in caplog.messages if line.startswith("b ")]) == MAX_LINES_AT_ONCE + 9
    assert [line for line in caplog.messages if line.startswith("c ")] == ["c is here"]  # others are not affected
    now += SECONDS_BETWEEN_LINES
    states.add([PeerReport("b", "here")])
    states.add([PeerReport("b", "here")])
    assert caplog.messages[-1] == "b is here"
    assert len(caplog.messages) == MAX_LINES_AT_ONCE + 9 + 2
    now += 10 * MAX_LINES_AT_ONCE * SECONDS_BETWEEN_LINES  # the lines are not saved up without limit
    for number in range(100):
        states.add([PeerReport("b", "refused", f"note {number}")])
    assert len(caplog.messages) == 2 * MAX_LINES_AT_ONCE + 9 + 2


def test_peer_that_is_not_started_yet_is_logged_after_some_seconds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cgd")
    now = 100.0
    states = StateLog(lambda: now)
    for note in ("not reached yet", "nobody answers there"):
        states.add(
            [PeerReport("b", "missing", note), PeerReport("c", "missing", note), PeerReport("d", "refused", "x")]
        )
    assert caplog.messages == ["d is refused: x"]  # what waiting does not change is logged at once
    now += SETTLE_SECONDS / 2
    states.add([PeerReport("b", "here"), PeerReport("c", "missing", "nobody answers there")])
    now += SETTLE_SECONDS / 2
    states.add([PeerReport("c", "missing", "nobody answers there"), PeerReport("late", "missing", "not reached yet")])
    assert caplog.messages[1:] == ["b is here", "c is missing: nobody answers there"]
    now += SETTLE_SECONDS  # a member that is new has its own time
    states.add([PeerReport("late", "missing", "not reached yet")])
    assert caplog.messages[3:] == ["late is missing: not reached yet"]


def test_short_absence_is_not_logged_and_a_refusal_is_at_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cgd")
    now = 100.0
    states = StateLog(lambda: now)

    def after(seconds: float, state: str, note: str = "") -> list[str]:
        nonlocal now
        now += seconds
        states.add([PeerReport("b", state, note, seen=True)])
        lines = list(caplog.messages)
        caplog.clear()
        return lines

    assert after(0, "here") == ["b is here"]
    assert after(60, "missing", "connected, and not yet accepted") == []
    assert after(0.9 * SETTLE_SECONDS, "missing", "the connection was lost") == []
    assert after(1, "here") == []
    assert after(1, "missing", "the connection was lost") == []  # a new absence
    assert after(0.9 * SETTLE_SECONDS, "missing", "the connection was lost") == []
    assert after(0.1 * SETTLE_SECONDS, "missing", "the connection was lost") == [
        "b is missing: the connection was lost"
    ]
    assert after(1, "refused", "another file") == ["b is refused: another file"]
    assert after(1, "left", "it stopped") == ["b is left: it stopped"]


def test_history_has_the_begin_of_every_absence_and_return() -> None:
    start = now = datetime(2026, 11, 18, 12, 0, tzinfo=UTC)
    history = StateHistory(lambda: now)

    def after(seconds: float, state: str) -> tuple[float, bool]:
        nonlocal now
        now = start + timedelta(seconds=seconds)
        (report,) = history.add([PeerReport("b", state)])
        assert (report.name, report.state) == ("b", state)
        assert report.since is not None
        return (report.since - start).total_seconds(), report.seen

    assert after(0, "missing") == (0, False)
    assert after(1, "refused") == (1, False)  # what happened at that time
    assert after(1.5, "missing") == (1, False)
    assert after(2, "here") == (2, False)
    assert after(3, "here") == (2, True)
    assert after(4, "left") == (4, True)
    assert after(5, "missing") == (4, True)  # absent all the time
    assert after(5.5, "left") == (5.5, True)
    assert after(5.7, "left") == (5.5, True)
    assert after(6, "done") == (6, True)
    assert history.add([]) == []  # removed from the federation; added again, it is a new member
    assert after(7, "missing") == (7, False)
