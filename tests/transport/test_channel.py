"""End-to-end encrypted messages: only the peer can read them, and tampering by the hub is detected."""

from __future__ import annotations

import random

import pytest
import zmq
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, settings
from hypothesis import strategies as st
from zmq.utils import z85

from cgd.errors import HubError, InputError
from cgd.secagg.noise import SymmetricState, agree
from cgd.transport.channel import (
    HEADER_BYTES,
    MAX_ANSWERED_HANDSHAKES,
    MAX_HANDSHAKES,
    MAX_SESSIONS,
    MAX_UNANSWERED_HELLOS,
    Channel,
    ChannelFactory,
    IncompatibleError,
    PacketKind,
)

PAIRS = {name: zmq.curve_keypair() for name in ("a", "b", "c")}
PUBLIC = {name: public for name, (public, _) in PAIRS.items()}
SECRET = b"a secret that only the peer may read"


def new_process(name: str, keys: dict[str, bytes] = PUBLIC) -> ChannelFactory:
    return ChannelFactory(name, PAIRS[name][1], dict(keys))


def complete_handshake(initiator: Channel, responder: Channel) -> tuple[bytes, bytes]:
    """Complete a handshake; return its two messages."""
    first = initiator.start_handshake()
    second = responder.open(first, 1).answer
    assert second is not None
    assert initiator.open(second, 1).content is None
    return first, second


class Ends:
    """The ends of a and b, with a session that a has started."""

    def __init__(self, a: ChannelFactory | None = None, b: ChannelFactory | None = None) -> None:
        self.a, self.b = a or new_process("a"), b or new_process("b")
        self.out: Channel = self.a.with_peer("b")
        self.into: Channel = self.b.with_peer("a")
        self.handshake = complete_handshake(self.out, self.into)

    def seal(self, content: bytes = SECRET, connection: int = 1) -> bytes:
        sealed = self.out.seal(content, self.b.process, connection)
        assert sealed is not None
        return sealed


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
    with pytest.raises(IncompatibleError if incompatible else HubError):
        into.open(bytes(sealed), 1)
    assert into.open(message, 1).stale is False  # the unaltered message is accepted after it


def test_messages_with_an_altered_session_count_as_lost() -> None:
    ends = Ends()
    ends.into.open(ends.seal(), 1)
    with pytest.raises(HubError, match="loses messages from a: [0-9]+ so far, and it continues"):
        for _ in range(1000):
            sealed = ends.seal()
            assert ends.into.open(sealed[:16] + bytes(8) + sealed[24:], 1).stale
            ends.into.open(ends.seal(), 1)


@given(st.integers(0, 140), st.sampled_from(PacketKind))
def test_truncated_message_is_detected(length: int, kind: PacketKind) -> None:
    into, message = undelivered(Ends(), kind)
    with pytest.raises(HubError, match="altered a message from"):
        into.open(message[: min(length, len(message) - 1)], 1)


def test_swapped_senders_and_recipients_are_detected() -> None:
    a, b, c = new_process("a"), new_process("b"), new_process("c")
    for one, other in ((a, b), (c, b), (a, c)):
        complete_handshake(one.with_peer(other.me), other.with_peer(one.me))

    def message(sender: ChannelFactory, recipient: ChannelFactory, handshake: bool) -> bytes:
        channel = sender.with_peer(recipient.me)
        return channel.start_handshake() if handshake else channel.seal(SECRET, recipient.process, 1) or b""

    for handshake in (True, False):
        with pytest.raises(HubError, match="swapped messages: it relayed a message from c to b as one from a to us"):
            b.with_peer("a").open(message(c, b, handshake), 1)
        with pytest.raises(HubError, match="swapped messages: .* from a to c as one from a to us"):
            b.with_peer("a").open(message(a, c, handshake), 1)
    with pytest.raises(HubError, match="swapped messages: .* from b to a as one from a to us"):
        b.with_peer("a").open(b.with_peer("a").start_handshake(), 1)


def test_repeated_message_is_detected_even_after_a_reconnection() -> None:
    ends = Ends()
    first, second = ends.seal(), ends.seal()
    later = ends.seal(connection=2)
    for each in (first, second, later):
        ends.into.open(each, 1)
    for each in (first, second, later):
        with pytest.raises(HubError, match="repeated or reordered messages from a"):
            ends.into.open(each, 1)


def test_reordered_messages_are_detected() -> None:
    ends = Ends()
    first, second = ends.seal(), ends.seal()
    ends.into.open(second, 1)
    with pytest.raises(HubError, match="repeated or reordered messages from a"):
        ends.into.open(first, 1)


@pytest.mark.parametrize("which", [0, 1])
def test_repeated_handshake_message_is_detected_and_the_session_continues(which: int) -> None:
    ends = Ends()
    ends.into.open(ends.seal(), 1)
    with pytest.raises(HubError, match="repeated or reordered messages from"):
        (ends.into, ends.out)[which].open(ends.handshake[which], 1)
    assert ends.into.open(ends.seal(), 1).content == SECRET
    assert ends.into.process == ends.a.process


# Replay and impersonation.


def test_first_message_changes_nothing_until_its_session_is_used() -> None:
    """It may be a replay. Only the first transport message proves that the peer is present now."""
    ends = Ends()
    ends.into.open(ends.seal(), 1)
    restarted = new_process("a")
    second = ends.into.open(restarted.with_peer("b").start_handshake(), 1).answer
    assert second is not None
    assert ends.into.process == ends.a.process
    assert ends.into.open(ends.seal(), 1).content == SECRET
    restarted.with_peer("b").open(second, 1)
    sealed = restarted.with_peer("b").seal(SECRET, ends.b.process, 1)
    assert sealed is not None
    assert ends.into.open(sealed, 1).process == restarted.process
    assert ends.into.process == restarted.process


def test_messages_recorded_before_a_restart_have_no_effect_on_the_new_process() -> None:
    ends = Ends()
    recorded = [ends.handshake[0], *(ends.seal() for _ in range(3))]
    restarted = new_process("b").with_peer("a")
    answer = restarted.open(recorded[0], 1).answer  # it cannot be distinguished from a new one
    assert answer is not None
    for each in recorded[1:]:  # but transport messages need the keys of the old session
        assert restarted.open(each, 1).stale
    assert restarted.process == b""
    assert restarted.seal(SECRET, ends.a.process, 1) is None
    assert new_process("a").with_peer("b").open(answer, 1).stale


def test_replayed_first_messages_do_not_disturb_a_running_session() -> None:
    """Not even if older ones are no longer recognised."""
    old = [new_process("a").with_peer("b").start_handshake() for _ in range(3 * MAX_HANDSHAKES)]
    ends = Ends()
    ends.into.open(ends.seal(), 1)
    for each in old:
        assert ends.into.open(each, 1).answer is not None
    ends.into._answered.clear()  # as after more than MAX_ANSWERED_HANDSHAKES
    for each in (*old, ends.handshake[0]):
        ends.into.open(each, 1)
    assert ends.into.process == ends.a.process
    assert ends.into.open(ends.seal(), 1).content == SECRET


class Impersonator:
    """An attacker with the secret key of b, not of a, that pretends to be a towards b."""

    def __init__(self) -> None:
        self.stolen_key = X25519PrivateKey.from_private_bytes(z85.decode(PAIRS["b"][1]))
        self.ephemeral = X25519PrivateKey.generate()
        self.a, self.b = z85.decode(PUBLIC["a"]), z85.decode(PUBLIC["b"])

    def first_message(self) -> bytes:
        """Return the first message as a would write it: es and ss can be computed with the secret key of b."""
        self.state = SymmetricState(new_process("a").with_peer("b")._outbound_prologue)
        public = self.ephemeral.public_key().public_bytes_raw()
        for each in (self.a, self.b, public):
            self.state.mix_hash(each)
        self.state.mix_key(agree(self.ephemeral, self.b))
        self.state.mix_key(agree(self.stolen_key, self.a))
        header = new_process("a").with_peer("b").start_handshake()[:16] + public[:8] + bytes(8)
        return header + public + self.state.encrypt_and_hash(b"impostor")

    def keys_after(self, second: bytes, guess: bytes) -> tuple[bytes, bytes]:
        """Return the session keys for a guess of se, which needs the secret key of a or the ephemeral key of b."""
        theirs = second[HEADER_BYTES : HEADER_BYTES + 32]
        self.state.mix_hash(theirs)
        self.state.mix_key(agree(self.ephemeral, theirs))
        self.state.mix_key(guess)
        return self.state.split()


def test_attacker_with_our_secret_key_cannot_start_a_session_as_another_participant() -> None:
    """Key-compromise impersonation: the first message is answered, but the session cannot be used."""
    into = new_process("b").with_peer("a")
    impostor = Impersonator()
    first = impostor.first_message()
    second = into.open(first, 1).answer
    assert second is not None
    theirs = second[HEADER_BYTES : HEADER_BYTES + 32]
    for guess in (
        agree(impostor.stolen_key, theirs),
        agree(impostor.stolen_key, impostor.a),
        agree(impostor.ephemeral, theirs),
    ):
        key, _ = impostor.keys_after(second, guess)
        header = first[:5] + bytes([PacketKind.TRANSPORT]) + first[6:HEADER_BYTES]
        assert into.open(header + AESGCM(key).encrypt(bytes(12), SECRET, header), 1).stale
    assert into.process == b""


def test_attacker_with_our_secret_key_cannot_answer_a_handshake_as_another_participant() -> None:
    into = new_process("b").with_peer("a")
    first = into.start_handshake()
    impostor = Impersonator()
    # es needs the secret key of a or the ephemeral key of b; the attacker has only:
    guesses = (
        agree(impostor.stolen_key, impostor.a),
        agree(impostor.stolen_key, first[HEADER_BYTES : HEADER_BYTES + 32]),
    )
    for guess in guesses:
        state = SymmetricState(into._outbound_prologue)
        for each in (impostor.b, impostor.a, first[HEADER_BYTES : HEADER_BYTES + 32]):
            state.mix_hash(each)
        state.mix_key(guess)
        state.mix_key(agree(impostor.stolen_key, impostor.a))
        state.mix_hash(first[HEADER_BYTES + 32 :])
        public = impostor.ephemeral.public_key().public_bytes_raw()
        state.mix_hash(public)
        state.mix_key(agree(impostor.ephemeral, first[HEADER_BYTES : HEADER_BYTES + 32]))
        state.mix_key(agree(impostor.ephemeral, impostor.b))
        header = (
            first[:5] + bytes([PacketKind.SECOND]) + first[6:8] + into._inbound_fingerprint + first[16:HEADER_BYTES]
        )
        with pytest.raises(HubError, match="its authentication tag is wrong"):
            into.open(header + public + state.encrypt_and_hash(b"impostor"), 1)
    assert into.process == b""


def test_both_ends_may_start_a_handshake_at_the_same_time() -> None:
    a, b = new_process("a"), new_process("b")
    one, other = a.with_peer("b"), b.with_peer("a")
    from_a, from_b = one.start_handshake(), other.start_handshake()
    to_a, to_b = other.open(from_a, 1).answer, one.open(from_b, 1).answer
    assert to_a is not None
    assert to_b is not None
    one.open(to_a, 1)
    other.open(to_b, 1)
    for _ in range(3):
        for sender, recipient, process_ in ((one, other, b.process), (other, one, a.process)):
            sealed = sender.seal(SECRET, process_, 1)
            assert sealed is not None
            assert recipient.open(sealed, 1).content == SECRET


def test_hello_starts_a_handshake_if_there_is_no_answer() -> None:
    ends = Ends()
    fresh = new_process("a").with_peer("b")
    assert [each[5] for each in fresh.seal_hello(b"hello", 1)] == [PacketKind.FIRST]
    for _ in range(MAX_UNANSWERED_HELLOS):
        assert [each[5] for each in ends.out.seal_hello(b"hello", 1)] == [PacketKind.TRANSPORT]
    sealed, first = ends.out.seal_hello(b"hello", 1)
    assert (sealed[5], first[5]) == (PacketKind.TRANSPORT, PacketKind.FIRST)
    ends.into.open(sealed, 1)
    back = ends.into.seal(b"welcome", ends.a.process, 1)
    assert back is not None
    ends.out.open(back, 1)
    assert len(ends.out.seal_hello(b"hello", 1)) == 1


def test_number_of_handshakes_and_sessions_is_bounded() -> None:
    ends = Ends()
    for _ in range(3 * MAX_SESSIONS):
        peer = new_process("a")
        complete_handshake(peer.with_peer("b"), ends.into)
        ends.into.open(peer.with_peer("b").seal(b"", ends.b.process, 1) or b"", 1)
        ends.into.start_handshake()
    for _ in range(3 * MAX_HANDSHAKES):
        ends.into.open(ends.out.start_handshake(), 1)
    assert len(ends.into._sessions) == MAX_SESSIONS
    assert len(ends.into._offered) == len(ends.into._started) == MAX_HANDSHAKES
    assert len(ends.into._answered) <= MAX_ANSWERED_HANDSHAKES


def test_handshake_with_an_invalid_process_is_rejected() -> None:
    odd = new_process("a")
    odd.process = b"x" * 9
    with pytest.raises(IncompatibleError, match="names a process by 9 bytes instead of 8"):
        new_process("b").with_peer("a").open(odd.with_peer("b").start_handshake(), 1)


def test_public_key_of_small_order_is_rejected() -> None:
    with pytest.raises(InputError, match="the public key of b, .* cannot be used; it needs a new one"):
        new_process("a", PUBLIC | {"b": z85.encode(bytes(32))}).with_peer("b")


# Restarts and reconnections.


def test_late_message_of_a_replaced_connection_is_ignored() -> None:
    ends = Ends()
    ends.into.open(ends.seal(), 1)
    late = ends.seal()
    ends.into.open(ends.seal(connection=2), 1)
    assert ends.into.open(late, 1).content is None
    assert ends.into.open(ends.seal(connection=2), 1).content == SECRET


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


def test_message_of_another_version_is_incompatible() -> None:
    sealed = new_process("a").with_peer("b").start_handshake()
    with pytest.raises(
        IncompatibleError, match="its encrypted messages are of version 1, ours of 2; install the same cgd"
    ):
        new_process("b").with_peer("a").open(sealed[:4] + b"\1" + sealed[5:], 1)


def test_message_without_the_participants_secret_key_is_detected() -> None:
    """The hub knows all public keys, the fingerprints and all messages, but not the secret of the two participants."""
    forger = ChannelFactory("a", zmq.curve_keypair()[1], PUBLIC)
    with pytest.raises(HubError, match="altered a message from a: its authentication tag is wrong"):
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


def test_channel_with_the_same_key_is_reused() -> None:
    """A peer may be removed and added again while this process runs."""
    ends = Ends()
    ends.into.open(ends.seal(), 1)
    assert ends.a.with_peer("b") is ends.out
    assert ends.into.open(ends.seal(), 1).content == SECRET
    ends.a.public_keys["b"] = zmq.curve_keypair()[0]
    assert ends.a.with_peer("b") is not ends.out


def messages_until_loss_error(rate: float, count: int, seed: int = 1) -> int | None:
    """Return the number of messages until a loss of this rate raises HubError; None if it does not."""
    ends, rng = Ends(), random.Random(seed)
    for number in range(count):
        sealed = ends.seal(b"")
        if rng.random() >= rate:
            try:
                ends.into.open(sealed, 1)
            except HubError as error:
                assert "loses messages from a" in str(error)
                return number
    return None


def test_continued_losses_raise_an_error_and_few_losses_do_not() -> None:
    assert messages_until_loss_error(0.0, 2000) is None
    assert messages_until_loss_error(0.05, 5000) is None
    detected_after = messages_until_loss_error(0.5, 5000)
    assert detected_after is not None
    assert detected_after < 1500
    assert (messages_until_loss_error(0.9, 5000) or 5000) < 1500


def test_one_long_gap_raises_no_error() -> None:
    ends = Ends()
    ends.into.open(ends.seal(b""), 1)
    for _ in range(10_000):
        ends.seal(b"")
    ends.into.open(ends.seal(b""), 1)
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


def test_repr_shows_no_secrets() -> None:
    text = repr(new_process("a")) + repr(Ends().out) + repr(Ends().out._sessions)
    assert PAIRS["a"][1].decode() not in text
    assert z85.decode(PAIRS["a"][1]).hex() not in text
