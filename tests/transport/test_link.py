"""A link over a channel that loses, cuts and restarts: what arrives is what was sent, once and in order."""

from __future__ import annotations

import random
from collections import deque
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgd.transport import link
from cgd.transport.link import Datagram, DatagramError, DatagramKind, Incoming, Outgoing

if TYPE_CHECKING:
    from cgd.secagg.messages import Buffer

ME, THEM = b"m" * 8, b"t" * 8


class Channel:
    """One sender, one receiver, and a wire that keeps order but may be cut, losing what is on it."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.now = 0.0
        self.out, self.into = Outgoing(ME, b"a"), Incoming(THEM)
        self.there: deque[Datagram] = deque()
        self.back: deque[Datagram] = deque()
        self.delivered: list[bytes] = []
        self.unread: deque[Buffer] = deque()

    def restart_receiver(self, incarnation: bytes) -> None:
        self.into = Incoming(incarnation)
        self.unread.clear()
        self.cut()

    def cut(self) -> None:
        self.there.clear()
        self.back.clear()

    def step(self) -> None:
        """One small thing happens."""
        self.now += 0.02
        match self.rng.randrange(4):
            case 0:
                while (datagram := self.out.next_datagram(self.now)) is not None:
                    self.there.append(datagram)
            case 1 if self.there:
                self._arrive(self.there.popleft())
            case 2 if self.back:
                answer = self.out.take(self.back.popleft(), self.now)
                if answer is not None:
                    self.there.append(answer)
            case 3 if self.unread:
                frame = bytes(self.unread.popleft())
                self.delivered.append(frame)
                self._reply(self.into.consumed(len(frame)))

    def _arrive(self, datagram: Datagram) -> None:
        datagram = link.from_bytes(datagram.to_bytes())
        if datagram.kind is DatagramKind.HELLO:
            self._reply(self.into.hello(datagram, b"channel", self.now))
            return
        frame, answer = self.into.take(datagram, b"channel", self.now)
        if frame is not None:
            self.unread.append(frame)
        self._reply(answer)

    def _reply(self, datagram: Datagram | None) -> None:
        if datagram is not None:
            self.back.append(link.from_bytes(datagram.to_bytes()))


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 60), st.floats(0, 0.05))
def test_everything_arrives_once_and_in_order_however_often_the_channel_breaks(
    seed: int, count: int, cuts: float
) -> None:
    rng = random.Random(seed)
    channel = Channel(rng)
    frames = [rng.randbytes(rng.randrange(5)) + bytes([i]) for i in range(count)]
    waiting = deque(frames)
    for _ in range(20_000):
        if waiting and rng.random() < 0.3 and channel.out.offer(waiting[0]):
            waiting.popleft()
        if rng.random() < cuts and channel.now < 20:
            channel.cut()
        channel.step()
        if len(channel.delivered) == count:
            break
    assert channel.delivered == frames


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 40))
def test_a_restarted_receiver_gets_what_the_one_before_did_not_consume(seed: int, count: int) -> None:
    rng = random.Random(seed)
    channel = Channel(rng)
    frames = [bytes([i]) for i in range(count)]
    for frame in frames:
        assert channel.out.offer(frame)
    for _ in range(rng.randrange(400)):
        channel.step()
    before = len(channel.delivered)
    channel.restart_receiver(b"u" * 8)
    for _ in range(5_000):
        channel.step()
    after = channel.delivered[before:]
    # What it gets is in order, without a hole, and lacks nothing that was not read before.
    assert after == frames[len(frames) - len(after) :]
    assert len(after) >= count - before


def test_a_window_is_all_that_is_under_way() -> None:
    out = Outgoing(ME, b"a")
    frame = bytes(link.WINDOW // 2)
    assert out.offer(bytes(link.WINDOW * 2))  # an empty way takes a frame of any size
    assert not out.offer(b"x")
    out = Outgoing(ME, b"a")
    assert out.offer(frame)
    assert out.offer(frame)
    assert not out.offer(b"x")


def hello(incarnation: bytes) -> Datagram:
    return Datagram(DatagramKind.HELLO, incarnation, link.NOBODY, 0, b"a")


def test_a_second_process_is_let_in_only_when_the_first_is_silent() -> None:
    into = Incoming(THEM)
    welcome = into.hello(hello(ME), b"1", 0.0)
    assert welcome.kind is DatagramKind.WELCOME
    second = into.hello(hello(b"x" * 8), b"2", 1.0)
    assert second.kind is DatagramKind.REFUSED
    assert b"another process with this key" in bytes(second.body)
    probe = into.probe()
    assert probe is not None
    answer = Outgoing(ME, b"a")
    answer.take(into.hello(hello(ME), b"1", 1.0), 1.0)
    assert answer.take(Datagram(DatagramKind.PROBE, welcome.sender, ME), 1.1) is not None
    for _ in range(5):  # it answers, so it stays
        frame, ack = into.take(Datagram(DatagramKind.PING, ME, welcome.sender), b"1", 1.2)
        assert frame is None
        assert ack is not None
    assert into.hello(hello(b"x" * 8), b"2", 1.3).kind is DatagramKind.REFUSED
    assert into.hello(hello(b"x" * 8), b"2", 1.2 + link.SILENT_SECONDS).kind is DatagramKind.WELCOME
    frame, _ = into.take(Datagram(DatagramKind.DATA, ME, THEM, 0, b"old"), b"1", 9.0)
    assert frame is None
    assert into.stale == 1


def test_a_first_process_whose_channel_is_gone_makes_room_at_once() -> None:
    into = Incoming(THEM)
    into.hello(hello(ME), b"1", 0.0)
    into.gone()
    assert into.hello(hello(b"x" * 8), b"2", 0.1).kind is DatagramKind.WELCOME


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "truncated"),
        (b"CGDL", "truncated"),
        (bytes(40), "not a datagram of cgd"),
        (b"CGDL\x09" + bytes(40), "version 9 of the link"),
        (b"CGDL\x01\x63" + bytes(40), "unknown kind 99"),
        (b"CGDL\x01\x02" + bytes(link.MAX_FRAME_BYTES + 40), "oversized"),
    ],
)
def test_what_is_no_datagram_is_told(data: bytes, says: str) -> None:
    with pytest.raises(DatagramError, match=says):
        link.from_bytes(data)


@given(st.binary(max_size=80))
def test_garbage_is_never_more_than_an_error(data: bytes) -> None:
    with pytest.raises(DatagramError):
        link.from_bytes(data)


@given(
    st.lists(
        st.builds(
            Datagram,
            st.sampled_from(DatagramKind),
            st.sampled_from([ME, THEM]),
            st.sampled_from([ME, THEM]),
            st.integers(0, 2**64 - 1),
            st.binary(max_size=20),
        ),
        max_size=30,
    )
)
def test_no_sequence_of_datagrams_breaks_either_end(datagrams: list[Datagram]) -> None:
    """From somebody with the right key and the right incarnations, and nothing else right."""
    out, into = Outgoing(ME, b"a"), Incoming(THEM)
    out.offer(b"frame")
    for now, datagram in enumerate(datagrams):
        out.take(datagram, float(now))
        out.next_datagram(float(now))
        if datagram.kind is DatagramKind.HELLO:
            into.hello(datagram, b"c", float(now))
        elif datagram.kind in (DatagramKind.DATA, DatagramKind.PING):
            into.take(datagram, b"c", float(now))
    assert out.rest(1e9) == 0.0


# Several processes of one peer.


class Route:
    """The way from some processes of one peer to us; time is up to the test."""

    def __init__(self) -> None:
        self.into = Incoming(b"u" * 8)
        self.now = 0.0

    def carry(self, out: Outgoing, seconds: float) -> list[bytes]:
        """What arrives of a process in this time."""
        arrived = []
        end = self.now + seconds
        while self.now < end:
            datagram = out.next_datagram(self.now)
            if datagram is None:
                self.now += 0.05
                continue
            frame, answer = self._take(datagram)
            if frame is not None:
                arrived.append(frame)
            if answer is not None:
                out.take(answer, self.now)
        return arrived

    def _take(self, datagram: Datagram) -> tuple[bytes | None, Datagram | None]:
        if datagram.kind is DatagramKind.HELLO:
            return None, self.into.hello(datagram, b"channel", self.now)
        frame, answer = self.into.take(datagram, b"channel", self.now)
        if frame is None:
            return None, answer
        return bytes(frame), self.into.consumed(len(frame), self.into.life) or answer


def test_the_first_process_is_heard_again_when_a_second_one_is_gone() -> None:
    route = Route()
    first, second = Outgoing(b"1" * 8, b"bob"), Outgoing(b"2" * 8, b"bob")
    for frame in (b"a", b"b"):
        first.offer(frame)
    assert route.carry(first, 2.0) == [b"a", b"b"]
    route.now += link.SILENT_SECONDS + 1.0
    second.offer(b"x")
    assert route.carry(second, 2.0) == [b"x"]
    route.now += link.SILENT_SECONDS + 1.0
    first.offer(b"c")
    assert route.carry(first, 20.0) == [b"c"]


def test_a_peer_is_heard_when_its_way_was_made_anew() -> None:
    """As when a new epoch has another address for it; both processes stay."""
    route = Route()
    out = Outgoing(b"1" * 8, b"bob")
    for number in range(5):
        out.offer(bytes([number]))
    assert len(route.carry(out, 3.0)) == 5
    route.into = Incoming(b"u" * 8)
    out.offer(b"later")
    assert route.carry(out, 20.0)[-1:] == [b"later"]
