from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from cgd.transport.state_log import MAX_LINES_AT_ONCE, SECONDS_BETWEEN_LINES, PeerReport, StateLog

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
