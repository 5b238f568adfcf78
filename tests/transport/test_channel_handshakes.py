"""Handshakes of encrypted channels: replayed ones, an attacker with our secret key, and the number of sessions."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from zmq.utils import z85

from cgd.errors import InputError
from cgd.secagg.noise import SymmetricState, agree
from cgd.transport.channel import (
    HEADER_BYTES,
    MAX_ANSWERED_HANDSHAKES,
    MAX_HANDSHAKES,
    MAX_SESSIONS,
    MAX_UNANSWERED_HELLOS,
    IncompatibleError,
    PacketKind,
    RelayError,
)
from support.channels import PAIRS, PUBLIC, SECRET, Ends, complete_handshake, new_process


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
        with pytest.raises(RelayError, match="its authentication tag is wrong"):
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
