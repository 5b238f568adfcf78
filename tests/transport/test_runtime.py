"""Nothing that a peer sends ends a participant's process."""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from cgd.secagg.federation_spec import FederationSpec
from cgd.secagg.membership import Membership
from cgd.transport.runtime import FederationRuntime
from support.identities import identity, public_keys

if TYPE_CHECKING:
    import pytest

MEMBERS = ("a", "b", "c")


class Inbox:
    """A transport that brings frames and loses what is sent."""

    me, members = "a", MEMBERS

    def __init__(self) -> None:
        self.frames: deque[tuple[str, bytes]] = deque()
        self.empty = threading.Event()

    def receive(self, timeout: float | None) -> tuple[str, bytes] | None:
        if self.frames:
            return self.frames.popleft()
        self.empty.wait(timeout)
        return None

    def send(self, to: str, frame: bytes) -> bool:
        return True

    def wake(self) -> None:
        """Nobody sleeps for long."""

    def close(self) -> None:
        self.empty.set()

    def status(self) -> dict[str, Any]:
        return {}

    def update(self, contacts: Any) -> None:
        """Nobody moves."""

    def backlog(self, *, connected: bool) -> int:
        return 0


def test_an_unexpected_error_in_the_handling_of_a_frame_is_a_refused_frame_with_a_traceback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    held = FederationSpec("trial", 1, MEMBERS, {"everyone": MEMBERS}, {"training": "x"}, "1.0", public_keys(MEMBERS))
    membership, handled = Membership("a", identity("a"), held), threading.Event()

    def receive(sender: str, data: bytes) -> None:
        if data == b"the second":
            handled.set()
        raise KeyError("something that nobody thought of")

    monkeypatch.setattr(membership, "receive", receive)
    transport = Inbox()
    transport.frames += [("b", b"the first"), ("c", b"the second")]
    with caplog.at_level(logging.WARNING, "cgd.transport"):
        runtime = FederationRuntime(transport, membership)
        assert handled.wait(60)
        runtime.close(done=False)
    assert "KeyError: 'something that nobody thought of'" in caplog.text
    assert "a message that cgd failed on from b" in caplog.text
    assert "a message that cgd failed on from c" in caplog.text
