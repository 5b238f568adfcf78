"""End-to-end encrypted messages: only the peer can read them, and tampering with them is detected."""

from __future__ import annotations

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from zmq.utils import z85

from cgd.transport.channel import HEADER_BYTES, Channel, ChannelFactory, IncompatibleError, PacketKind, RelayError
from support.channels import PAIRS, PUBLIC, SECRET, Ends, complete_handshake, new_process


@given(st.binary(max_size=300))
def test_message_is_decrypted_by_the_peer(content: bytes) -> None:
    ends = Ends()
    opened = ends.into.open(ends.seal(content), 1)
    assert (opened.content, opened.process) == (content, ends.a.process)
    sealed = ends.into.seal(content, ends.a.process, 1)
    assert sealed is not None
    back = ends.out.open(sealed, 1)
    assert (back.content, back.process) == (content, ends.b.process)


def test_ciphertexts_show_no_content_and_never_repeat() -> None:
    ends = Ends()
    sealed = [ends.seal() for _ in range(50)]
    assert not any(SECRET[i : i + 4] in each for each in sealed for i in range(len(SECRET) - 4))
    assert len({each[HEADER_BYTES:] for each in sealed}) == len(sealed)
    assert not any(each.process in message for each in (ends.a, ends.b) for message in ends.handshake)


def undelivered(ends: Ends, kind: PacketKind) -> tuple[Channel, bytes]:
    """Return a message that was not delivered yet, after its recipient."""
    if kind is PacketKind.TRANSPORT:
        ends.into.open(ends.seal(), 1)
        return ends.into, ends.seal()
    first = ends.out.start_handshake()
    if kind is PacketKind.FIRST:
        return ends.into, first
    second = ends.into.open(first, 1).answer
    assert second is not None
    return ends.out, second


@settings(max_examples=300)
@given(st.data(), st.sampled_from(PacketKind))
def test_any_altered_byte_is_detected(data: st.DataObject, kind: PacketKind) -> None:
    ends = Ends()
    into, message = undelivered(ends, kind)
    sealed = bytearray(message)
    place = data.draw(st.integers(0, len(sealed) - 1))
    sealed[place] ^= data.draw(st.integers(1, 255))
    renamed = 16 <= place < 24 and kind is not PacketKind.FIRST
    retyped = place == 5 and sealed[5] == PacketKind.TRANSPORT
    if renamed or retyped:  # a message of an unknown session has the effect of a lost message
        assert into.open(bytes(sealed), 1).stale
        return
    # The version and the fingerprint may be those of an honest participant with another program or file.
    incompatible = place == 4 or 8 <= place < 16
    with pytest.raises(IncompatibleError if incompatible else RelayError):
        into.open(bytes(sealed), 1)
    assert into.open(message, 1).stale is False  # the unaltered message is accepted after it


def test_messages_with_an_altered_session_count_as_lost() -> None:
    ends = Ends()
    ends.into.open(ends.seal(), 1)
    reported = []
    for _ in range(1000):
        sealed = ends.seal()
        assert ends.into.open(sealed[:16] + bytes(8) + sealed[24:], 1).stale
        reported.append(ends.into.open(ends.seal(), 1).losses)
    assert ends.into.lost == 1000
    assert 0 < len([losses for losses in reported if losses]) < 10


@given(st.integers(0, 140), st.sampled_from(PacketKind))
def test_truncated_message_is_detected(length: int, kind: PacketKind) -> None:
    into, message = undelivered(Ends(), kind)
    with pytest.raises(RelayError):
        into.open(message[: min(length, len(message) - 1)], 1)


def test_swapped_senders_and_recipients_are_detected() -> None:
    a, b, c = new_process("a"), new_process("b"), new_process("c")
    for one, other in ((a, b), (c, b), (a, c)):
        complete_handshake(one.with_peer(other.me), other.with_peer(one.me))

    def message(sender: ChannelFactory, recipient: ChannelFactory, handshake: bool) -> bytes:
        channel = sender.with_peer(recipient.me)
        return channel.start_handshake() if handshake else bytes(channel.seal(SECRET, recipient.process, 1) or b"")

    for handshake in (True, False):
        with pytest.raises(RelayError, match="it is encrypted as one from c to b"):
            b.with_peer("a").open(message(c, b, handshake), 1)
        with pytest.raises(RelayError, match="it is encrypted as one from a to c"):
            b.with_peer("a").open(message(a, c, handshake), 1)
    with pytest.raises(RelayError, match="it is encrypted as one from b to a"):
        b.with_peer("a").open(b.with_peer("a").start_handshake(), 1)


def test_repeated_message_is_detected_even_after_a_reconnection() -> None:
    ends = Ends()
    first, second = ends.seal(), ends.seal()
    later = ends.seal(connection=2)
    for each in (first, second, later):
        ends.into.open(each, 1)
    for each in (first, second, later):
        with pytest.raises(RelayError, match="it is not newer than the last one"):
            ends.into.open(each, 1)


def test_reordered_messages_are_detected() -> None:
    ends = Ends()
    first, second = ends.seal(), ends.seal()
    ends.into.open(second, 1)
    with pytest.raises(RelayError, match="it is not newer than the last one"):
        ends.into.open(first, 1)


@pytest.mark.parametrize("which", [0, 1])
def test_repeated_handshake_message_is_detected_and_the_session_continues(which: int) -> None:
    ends = Ends()
    ends.into.open(ends.seal(), 1)
    with pytest.raises(RelayError, match="it is not newer than the last one"):
        (ends.into, ends.out)[which].open(ends.handshake[which], 1)
    assert ends.into.open(ends.seal(), 1).content == SECRET
    assert ends.into.process == ends.a.process


def test_message_of_another_version_is_incompatible() -> None:
    sealed = new_process("a").with_peer("b").start_handshake()
    with pytest.raises(
        IncompatibleError, match="its encrypted messages are of version 1, ours of 2; install the same cgd"
    ):
        new_process("b").with_peer("a").open(sealed[:4] + b"\1" + sealed[5:], 1)


def test_message_without_the_participants_secret_key_is_detected() -> None:
    """The hub knows all public keys, the fingerprints and all messages, but not the secret of the two participants."""
    forger = ChannelFactory("a", zmq.curve_keypair()[1], PUBLIC)
    with pytest.raises(RelayError, match="its authentication tag is wrong"):
        new_process("b").with_peer("a").open(forger.with_peer("b").start_handshake(), 1)


def test_recorded_messages_stay_secret_if_both_static_keys_are_stolen_later() -> None:
    """The session keys depend on ephemeral keys (forward secrecy)."""
    ends = Ends()
    sealed = ends.seal()
    thief = new_process("b").with_peer("a")
    thief.open(ends.handshake[0], 1)
    opened = thief.open(sealed, 1)
    assert opened.stale
    assert opened.content is None


def test_repr_shows_no_secrets() -> None:
    text = repr(new_process("a")) + repr(Ends().out) + repr(Ends().out._sessions)
    assert PAIRS["a"][1].decode() not in text
    assert z85.decode(PAIRS["a"][1]).hex() not in text
