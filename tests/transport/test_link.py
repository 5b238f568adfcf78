"""A link over lossy connections and across restarts delivers every frame once and in order; it bounds its memory."""

from __future__ import annotations

import random
from collections import deque
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgd.transport import link
from cgd.transport.base import MAX_FRAME_BYTES
from cgd.transport.link import Datagram, DatagramError, DatagramKind, InboundLink, OutboundLink

if TYPE_CHECKING:
    from cgd.secagg.messages import Buffer

ME, THEM = b"m" * 8, b"t" * 8


class LossyLink:
    """One sender, one receiver, and a connection that keeps the order but can be cut, which loses what is in flight."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.now = 0.0
        self.outbound, self.inbound = OutboundLink(ME, b"a"), InboundLink(THEM)
        self.datagrams: deque[Datagram] = deque()
        self.answers: deque[Datagram] = deque()
        self.delivered: list[bytes] = []
        self.unread: deque[Buffer] = deque()

    def restart_receiver(self, incarnation: bytes) -> None:
        self.inbound = InboundLink(incarnation)
        self.unread.clear()
        self.cut()

    def cut(self) -> None:
        self.datagrams.clear()
        self.answers.clear()

    def step(self) -> None:
        """Do one random thing: send, deliver, answer, or read."""
        self.now += 0.02
        match self.rng.randrange(4):
            case 0:
                while (datagram := self.outbound.next_datagram(self.now)) is not None:
                    self.datagrams.append(datagram)
            case 1 if self.datagrams:
                self._deliver(self.datagrams.popleft())
            case 2 if self.answers:
                answer = self.outbound.receive(self.answers.popleft(), self.now)
                if answer is not None:
                    self.datagrams.append(answer)
            case 3 if self.unread:
                frame = bytes(self.unread.popleft())
                self.delivered.append(frame)
                self._reply(self.inbound.mark_consumed(len(frame)))

    def _deliver(self, datagram: Datagram) -> None:
        datagram = link.from_bytes(datagram.to_bytes())
        if datagram.kind is DatagramKind.HELLO:
            self._reply(self.inbound.on_hello(datagram, b"connection", self.now))
            return
        frame, answer = self.inbound.receive(datagram, b"connection", self.now)
        if frame is not None:
            self.unread.append(frame)
        self._reply(answer)

    def _reply(self, datagram: Datagram | None) -> None:
        if datagram is not None:
            self.answers.append(link.from_bytes(datagram.to_bytes()))


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 60), st.floats(0, 0.05))
def test_link_delivers_every_frame_once_and_in_order_over_broken_connections(
    seed: int, count: int, cuts: float
) -> None:
    rng = random.Random(seed)
    lossy = LossyLink(rng)
    frames = [rng.randbytes(rng.randrange(5)) + bytes([i]) for i in range(count)]
    waiting = deque(frames)
    for _ in range(20_000):
        if waiting and rng.random() < 0.3 and lossy.outbound.enqueue(waiting[0]):
            waiting.popleft()
        if rng.random() < cuts and lossy.now < 20:
            lossy.cut()
        lossy.step()
        if len(lossy.delivered) == count:
            break
    assert lossy.delivered == frames


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 40))
def test_restarted_receiver_gets_all_frames_that_were_not_consumed(seed: int, count: int) -> None:
    rng = random.Random(seed)
    lossy = LossyLink(rng)
    frames = [bytes([i]) for i in range(count)]
    for frame in frames:
        assert lossy.outbound.enqueue(frame)
    for _ in range(rng.randrange(400)):
        lossy.step()
    before = len(lossy.delivered)
    lossy.restart_receiver(b"u" * 8)
    for _ in range(5_000):
        lossy.step()
    after = lossy.delivered[before:]
    # The new process gets the last frames in order, and at least those that were not read before.
    assert after == frames[len(frames) - len(after) :]
    assert len(after) >= count - before


# Bounds of memory.


def test_outbound_link_accepts_no_more_than_a_window() -> None:
    outbound = OutboundLink(ME, b"a")
    frame = bytes(link.WINDOW_BYTES // 2)
    assert outbound.enqueue(bytes(link.WINDOW_BYTES * 2))  # an empty link accepts a frame of any size
    assert not outbound.enqueue(b"x")
    outbound = OutboundLink(ME, b"a")
    assert outbound.enqueue(frame)
    assert outbound.enqueue(frame)
    assert not outbound.enqueue(b"x")


def test_inbound_link_keeps_no_more_than_a_window_of_a_hostile_sender() -> None:
    inbound = InboundLink(THEM)
    recipient = inbound.on_hello(Datagram(DatagramKind.HELLO, ME, link.NO_INCARNATION), b"1", 0.0).sender

    def accepted(frame: bytes, first: int, count: int) -> int:
        datagrams = [Datagram(DatagramKind.DATA, ME, recipient, i, frame) for i in range(first, first + count)]
        return sum(inbound.receive(datagram, b"1", 0.0)[0] is not None for datagram in datagrams)

    megabyte = bytes(1 << 20)
    most = link.WINDOW_BYTES >> 20
    assert accepted(megabyte, 0, 3 * most) == most
    assert inbound.mark_consumed(len(megabyte)) is None
    assert accepted(megabyte, most, 5) == 1  # there is room for one again, and the numbers continue
    for _ in range(most):
        inbound.mark_consumed(len(megabyte))
    assert accepted(b"", most + 1, 2 * link.MAX_UNREAD_FRAMES) == link.MAX_UNREAD_FRAMES


def hello(incarnation: bytes) -> Datagram:
    return Datagram(DatagramKind.HELLO, incarnation, link.NO_INCARNATION, 0, b"a")


# Several processes with the key of one peer.


def test_second_process_is_accepted_only_when_the_first_is_silent() -> None:
    inbound = InboundLink(THEM)
    welcome = inbound.on_hello(hello(ME), b"1", 0.0)
    assert welcome.kind is DatagramKind.WELCOME
    second = inbound.on_hello(hello(b"x" * 8), b"2", 1.0)
    assert second.kind is DatagramKind.REJECTED
    assert bytes(second.body) == b"asking whether an earlier process with this key still runs"
    assert inbound.refused == 0
    assert inbound.next_probe() is not None
    first = OutboundLink(ME, b"a")
    first.receive(inbound.on_hello(hello(ME), b"1", 1.0), 1.0)
    assert first.receive(Datagram(DatagramKind.PROBE, welcome.sender, ME), 1.1) is not None
    for _ in range(5):  # the first process answers, so it stays accepted
        frame, ack = inbound.receive(Datagram(DatagramKind.PING, ME, welcome.sender), b"1", 1.2)
        assert frame is None
        assert ack is not None
    assert inbound.refused == 1
    again = inbound.on_hello(hello(b"x" * 8), b"2", 1.3)
    assert again.kind is DatagramKind.REJECTED
    assert bytes(again.body) == b"another process with this key is connected; stop it first"
    assert inbound.on_hello(hello(b"x" * 8), b"2", 1.2 + link.SILENT_SECONDS).kind is DatagramKind.WELCOME
    frame, _ = inbound.receive(Datagram(DatagramKind.DATA, ME, THEM, 0, b"old"), b"1", 9.0)
    assert frame is None
    assert inbound.dropped == 1


def test_restarted_process_is_not_counted_as_refused() -> None:
    """The killed process does not answer, so there was no second one; data that it sent before may still arrive."""
    inbound = InboundLink(THEM)
    welcome = inbound.on_hello(hello(ME), b"1", 0.0)
    restarted = hello(b"x" * 8)
    answers = [inbound.on_hello(restarted, b"2", 1 + i / 4) for i in range(3)]
    assert inbound.receive(Datagram(DatagramKind.DATA, ME, welcome.sender, 0, b"old"), b"1", 1.6)[0] is not None
    answers += [inbound.on_hello(restarted, b"2", 1.75 + i / 4) for i in range(7)]
    assert {bytes(each.body) for each in answers} == {b"asking whether an earlier process with this key still runs"}
    assert inbound.on_hello(restarted, b"2", 1.6 + link.SILENT_SECONDS).kind is DatagramKind.WELCOME
    assert inbound.receive(Datagram(DatagramKind.PING, ME, welcome.sender), b"1", 6.0)[0] is None
    assert inbound.refused == 0


def test_every_refused_hello_is_counted_when_the_first_process_answers() -> None:
    inbound = InboundLink(THEM)
    welcome = inbound.on_hello(hello(ME), b"1", 0.0)
    for number in range(5):
        inbound.on_hello(hello(bytes([number]) * 8), b"2", 1.0)
    ping = Datagram(DatagramKind.PING, ME, welcome.sender)
    for now in (1.1, 2.5):
        inbound.receive(ping, b"1", now)
        assert inbound.refused == 5
    inbound.on_hello(hello(b"y" * 8), b"2", 3.0)
    assert bytes(inbound.on_hello(hello(b"z" * 8), b"3", 3.1).body).startswith(b"asking whether")
    assert inbound.refused == 5


def test_second_process_is_accepted_at_once_when_the_connection_of_the_first_is_lost() -> None:
    inbound = InboundLink(THEM)
    inbound.on_hello(hello(ME), b"1", 0.0)
    inbound.mark_lost()
    assert inbound.on_hello(hello(b"x" * 8), b"2", 0.1).kind is DatagramKind.WELCOME


def test_flood_of_hellos_does_not_cause_a_flood_of_probes() -> None:
    inbound = InboundLink(THEM)
    inbound.on_hello(hello(ME), b"1", 0.0)
    probes = 0
    for i in range(1000):
        inbound.on_hello(hello(i.to_bytes(8, "little")), b"2", 1 + i / 1000)
        probes += inbound.next_probe() is not None
    assert 1 <= probes <= 1 + 1 / link.HELLO_SECONDS


class SimulatedPeer:
    """Delivers datagrams of several processes of one peer to us; the test controls the time."""

    def __init__(self) -> None:
        self.inbound = InboundLink(b"u" * 8)
        self.now = 0.0

    def deliver(self, outbound: OutboundLink, seconds: float) -> list[bytes]:
        """Return the frames of a process that arrive in this time."""
        frames = []
        end = self.now + seconds
        while self.now < end:
            datagram = outbound.next_datagram(self.now)
            if datagram is None:
                self.now += 0.05
                continue
            frame, answer = self._receive(datagram)
            if frame is not None:
                frames.append(frame)
            if answer is not None:
                outbound.receive(answer, self.now)
        return frames

    def _receive(self, datagram: Datagram) -> tuple[bytes | None, Datagram | None]:
        if datagram.kind is DatagramKind.HELLO:
            return None, self.inbound.on_hello(datagram, b"connection", self.now)
        frame, answer = self.inbound.receive(datagram, b"connection", self.now)
        if frame is None:
            return None, answer
        return bytes(frame), self.inbound.mark_consumed(len(frame), self.inbound.generation) or answer


def test_first_process_is_accepted_again_when_the_second_has_ended() -> None:
    peer = SimulatedPeer()
    first, second = OutboundLink(b"1" * 8, b"bob"), OutboundLink(b"2" * 8, b"bob")
    for frame in (b"a", b"b"):
        first.enqueue(frame)
    assert peer.deliver(first, 2.0) == [b"a", b"b"]
    peer.now += link.SILENT_SECONDS + 1.0
    second.enqueue(b"x")
    assert peer.deliver(second, 2.0) == [b"x"]
    peer.now += link.SILENT_SECONDS + 1.0
    first.enqueue(b"c")
    assert peer.deliver(first, 20.0) == [b"c"]


def test_link_recovers_when_the_receiver_has_created_a_new_route() -> None:
    """A new epoch may have another address for a peer; both processes continue."""
    peer = SimulatedPeer()
    outbound = OutboundLink(b"1" * 8, b"bob")
    for number in range(5):
        outbound.enqueue(bytes([number]))
    assert len(peer.deliver(outbound, 3.0)) == 5
    peer.inbound = InboundLink(b"u" * 8)
    outbound.enqueue(b"later")
    assert peer.deliver(outbound, 20.0)[-1:] == [b"later"]


# Invalid input.


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "truncated"),
        (b"CGDL", "truncated"),
        (bytes(40), "not a datagram of cgd"),
        (b"CGDL\x09" + bytes(40), "version 9 of the link"),
        (b"CGDL\x01\x63" + bytes(40), "unknown kind 99"),
        (b"CGDL\x01\x02" + bytes(MAX_FRAME_BYTES + 40), "oversized"),
        (Datagram(DatagramKind.DATA, ME, THEM, link.MAX_DATAGRAM_NUMBER + 1).to_bytes(), "malformed: the number"),
    ],
)
def test_invalid_datagram_raises_an_error_with_the_reason(data: bytes, message: str) -> None:
    with pytest.raises(DatagramError, match=message):
        link.from_bytes(data)


@given(st.binary(max_size=80))
def test_random_bytes_raise_datagram_error(data: bytes) -> None:
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
def test_no_sequence_of_datagrams_raises_an_exception(datagrams: list[Datagram]) -> None:
    """The sender has the right key and the right incarnations; all else is arbitrary."""
    outbound, inbound = OutboundLink(ME, b"a"), InboundLink(THEM)
    outbound.enqueue(b"frame")
    for now, datagram in enumerate(datagrams):
        outbound.receive(datagram, float(now))
        outbound.next_datagram(float(now))
        if datagram.kind is DatagramKind.HELLO:
            inbound.on_hello(datagram, b"c", float(now))
        elif datagram.kind in (DatagramKind.DATA, DatagramKind.PING):
            inbound.receive(datagram, b"c", float(now))
    assert outbound.idle_seconds(1e9) == 0.0


def test_numbers_at_the_end_of_their_range_can_be_sent() -> None:
    outbound = OutboundLink(ME, b"a")
    for i in range(3):
        outbound.enqueue(bytes([i]))
    outbound.receive(Datagram(DatagramKind.WELCOME, THEM, ME, link.MAX_DATAGRAM_NUMBER), 0.0)
    while (datagram := outbound.next_datagram(1.0)) is not None:
        datagram.to_bytes()
    assert outbound.idle_seconds(1.0) > 0


@pytest.mark.parametrize(("consumed", "received"), [(4, 4), (1, 4), (2, 1), (0, 2**63)])
def test_acknowledgement_of_frames_that_were_not_sent_is_ignored(consumed: int, received: int) -> None:
    """A dishonest receiver must not make us drop frames, or count beyond them."""
    outbound = OutboundLink(ME, b"a")
    for i in range(3):
        assert outbound.enqueue(bytes([i]))
    outbound.receive(Datagram(DatagramKind.WELCOME, THEM, ME), 0.0)
    sent = []
    while (datagram := outbound.next_datagram(0.0)) is not None and datagram.kind is DatagramKind.DATA:
        sent.append(datagram.number)
    assert sent == [0, 1, 2]
    outbound.receive(Datagram(DatagramKind.ACK, THEM, ME, consumed, link._COUNTS.pack(received, 0)), 0.0)
    assert outbound.unconsumed == 3
    outbound.receive(Datagram(DatagramKind.ACK, THEM, ME, 2, link._COUNTS.pack(3, 0)), 0.0)
    assert outbound.unconsumed == 1


def test_frame_of_an_ended_process_does_not_count_for_its_successor() -> None:
    inbound = InboundLink(THEM)
    accepted = inbound.on_hello(Datagram(DatagramKind.HELLO, ME, link.NO_INCARNATION), b"connection", 0.0).sender
    data = Datagram(DatagramKind.DATA, ME, accepted, 0, bytes(link.WINDOW_BYTES))
    frame, _ = inbound.receive(data, b"connection", 0.0)
    assert frame is not None
    generation = inbound.generation
    inbound.mark_lost()
    accepted = inbound.on_hello(Datagram(DatagramKind.HELLO, b"n" * 8, link.NO_INCARNATION), b"another", 0.0).sender
    assert inbound.mark_consumed(len(frame), generation) is None
    _, answer = inbound.receive(Datagram(DatagramKind.PING, b"n" * 8, accepted, 0), b"another", 0.0)
    assert answer is not None
    assert (answer.kind, answer.number) == (DatagramKind.ACK, 0)


def test_rejection_reason_has_no_control_characters() -> None:
    outbound = OutboundLink(ME, b"a")
    forged = b"sorry\ncgd: all is well\x1b[2J"
    outbound.receive(Datagram(DatagramKind.REJECTED, THEM, ME, 0, forged), 0.0)
    assert outbound.rejection is not None
    assert outbound.rejection.isprintable()
    assert outbound.rejection.startswith("sorry")
    assert len(outbound.rejection) == len(forged)
