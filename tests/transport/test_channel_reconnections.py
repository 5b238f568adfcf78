"""Encrypted channels over restarts, reconnections and losses: late messages are ignored, and losses are counted."""

from __future__ import annotations

import random

import pytest
import zmq

from cgd.transport.channel import IncompatibleError
from cgd.transport.channel_session import _NUMBERS_PER_CONNECTION, MAX_CONNECTIONS, ChannelSession
from support.channels import PUBLIC, SECRET, Ends, new_process


def test_late_message_of_a_replaced_connection_is_ignored() -> None:
    ends = Ends()
    ends.into.open(ends.seal(), 1)
    late = ends.seal()
    ends.into.open(ends.seal(connection=2), 1)
    assert ends.into.open(late, 1).content is None
    assert ends.into.open(ends.seal(connection=2), 1).content == SECRET


@pytest.mark.parametrize("connections", [range(1, 5001), range(5000, 0, -1)], ids=["rising", "falling"])
def test_number_of_connections_of_a_session_is_bounded(connections: range) -> None:
    """The peer chooses the numbers of its connections."""
    session = ChannelSession(bytes(8), bytes(8), (bytes(32), bytes(32)))
    for connection in connections:
        session.check_sequence(connection * _NUMBERS_PER_CONNECTION, 1)
        assert len(session._last) <= MAX_CONNECTIONS
    assert max(session._last) == 5000  # the newest one stays known: only its messages are delivered


def test_message_for_an_earlier_process_is_stale() -> None:
    ends = Ends()
    sealed = ends.seal()
    restarted = new_process("b").with_peer("a")
    for _ in range(2):
        assert restarted.open(sealed, 1).stale


def test_message_under_another_federation_file_is_incompatible() -> None:
    other = new_process("a", PUBLIC | {"b": zmq.curve_keypair()[0]})
    renamed = new_process("a", PUBLIC | {"beth": PUBLIC["b"]})
    for sealed in (other.with_peer("b").start_handshake(), renamed.with_peer("beth").start_handshake()):
        with pytest.raises(IncompatibleError, match="with other keys than our federation file has"):
            new_process("b").with_peer("a").open(sealed, 1)


def test_channel_with_the_same_key_is_reused() -> None:
    """A peer may be removed and added again while this process runs."""
    ends = Ends()
    ends.into.open(ends.seal(), 1)
    assert ends.a.with_peer("b") is ends.out
    assert ends.into.open(ends.seal(), 1).content == SECRET
    ends.a.public_keys["b"] = zmq.curve_keypair()[0]
    assert ends.a.with_peer("b") is not ends.out


def messages_until_losses_are_reported(rate: float, count: int, seed: int = 1) -> int | None:
    """Return the number of messages until a loss of this rate is reported; None if it is not."""
    ends, rng = Ends(), random.Random(seed)
    for number in range(count):
        sealed = ends.seal(b"")
        if rng.random() >= rate:
            opened = ends.into.open(sealed, 1)
            assert opened.content == b""
            if opened.losses:
                return number
    return None


def test_continued_losses_are_reported_and_few_losses_are_not() -> None:
    assert messages_until_losses_are_reported(0.0, 2000) is None
    assert messages_until_losses_are_reported(0.05, 5000) is None
    detected_after = messages_until_losses_are_reported(0.5, 5000)
    assert detected_after is not None
    assert detected_after < 1500
    assert (messages_until_losses_are_reported(0.9, 5000) or 5000) < 1500


def test_one_long_gap_is_not_reported() -> None:
    ends = Ends()
    ends.into.open(ends.seal(b""), 1)
    for _ in range(10_000):
        ends.seal(b"")
    assert ends.into.open(ends.seal(b""), 1).losses == 0
    assert ends.into.lost == 10_000


@pytest.mark.parametrize("whose", ["ours", "theirs"])
def test_losses_during_reconnections_do_not_count(whose: str) -> None:
    ends = Ends()
    for round_ in range(1, 100):
        theirs = round_ if whose == "theirs" else 1
        ends.into.open(ends.seal(b"", theirs), round_)
        for _ in range(20):
            ends.seal(b"", theirs)
    assert ends.into.lost == 0
