"""Noise KK is equal byte for byte to an independent implementation (the package noiseprotocol)."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, settings
from hypothesis import strategies as st
from noise.connection import Keypair, NoiseConnection

from cgd.secagg.noise import NAME, Handshake, nonce

KEYS = st.binary(min_size=32, max_size=32)
PAYLOADS = st.binary(max_size=80)
REJECTED = "does not match its keys|shared key|public key"


def key(secret: bytes) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(secret)


def public(secret: bytes) -> bytes:
    return key(secret).public_key().public_bytes_raw()


def theirs(initiator: bool, prologue: bytes, static: bytes, peer: bytes, ephemeral: bytes) -> NoiseConnection:
    """Return one side of the independent implementation."""
    made = NoiseConnection.from_name(NAME)
    made.set_prologue(prologue)
    if initiator:
        made.set_as_initiator()
    else:
        made.set_as_responder()
    made.set_keypair_from_private_bytes(Keypair.STATIC, static)
    made.set_keypair_from_public_bytes(Keypair.REMOTE_STATIC, public(peer))
    made.set_keypair_from_private_bytes(Keypair.EPHEMERAL, ephemeral)
    made.start_handshake()
    return made


@pytest.mark.filterwarnings("ignore:One of ephemeral keypairs is already set")
@settings(max_examples=50)
@given(KEYS, KEYS, KEYS, KEYS, PAYLOADS, PAYLOADS, PAYLOADS)
def test_both_sides_write_the_bytes_of_another_implementation(
    s_i: bytes, s_r: bytes, e_i: bytes, e_r: bytes, prologue: bytes, first: bytes, second: bytes
) -> None:
    initiator = Handshake(True, prologue, key(s_i), public(s_r), key(e_i))
    responder = Handshake(False, prologue, key(s_r), public(s_i), key(e_r))
    their_initiator = theirs(True, prologue, s_i, s_r, e_i)
    their_responder = theirs(False, prologue, s_r, s_i, e_r)
    one = initiator.write(first)
    assert one == bytes(their_initiator.write_message(first))
    assert responder.read(one) == bytes(their_responder.read_message(one)) == first
    two = responder.write(second)
    assert two == bytes(their_responder.write_message(second))
    assert initiator.read(two) == bytes(their_initiator.read_message(two)) == second
    to_responder, to_initiator = initiator.split()
    assert responder.split() == (to_initiator, to_responder)
    for count in range(2):
        assert AESGCM(to_responder).encrypt(nonce(count), first, b"") == their_initiator.encrypt(first)
        assert AESGCM(to_initiator).encrypt(nonce(count), second, b"") == their_responder.encrypt(second)


def handshakes() -> tuple[Handshake, Handshake]:
    one, other = X25519PrivateKey.generate(), X25519PrivateKey.generate()
    return (
        Handshake(True, b"p", one, other.public_key().public_bytes_raw()),
        Handshake(False, b"p", other, one.public_key().public_bytes_raw()),
    )


@given(st.data())
def test_altered_message_is_rejected_and_the_valid_one_is_read_after_it(data: st.DataObject) -> None:
    initiator, responder = handshakes()

    def altered(message: bytes) -> bytes:
        if data.draw(st.booleans()):
            return message[: data.draw(st.integers(0, len(message) - 1))]
        index = data.draw(st.integers(0, len(message) - 1))
        # The highest bit of an X25519 key is not used, but it is in the transcript.
        return message[:index] + bytes([message[index] ^ data.draw(st.integers(1, 255))]) + message[index + 1 :]

    first = initiator.write(b"1")
    with pytest.raises(ValueError, match=REJECTED):
        responder.read(altered(first))
    assert responder.read(first) == b"1"
    second = responder.write(b"2")
    with pytest.raises(ValueError, match=REJECTED):
        initiator.read(altered(second))
    assert initiator.read(second) == b"2"
    assert initiator.split() == responder.split()[::-1]


def test_another_prologue_or_static_key_is_rejected() -> None:
    one, other, third = (X25519PrivateKey.generate() for _ in range(3))
    one_public, other_public, third_public = (each.public_key().public_bytes_raw() for each in (one, other, third))
    first = Handshake(True, b"p", one, other_public).write()
    for responder in (
        Handshake(False, b"q", other, one_public),
        Handshake(False, b"p", other, third_public),
        Handshake(False, b"p", third, one_public),
    ):
        with pytest.raises(ValueError, match="a handshake message does not match its keys"):
            responder.read(first)


@pytest.mark.parametrize("order", ["first", "second"])
def test_key_of_small_order_is_rejected(order: str) -> None:
    initiator, responder = handshakes()
    if order == "first":
        with pytest.raises(ValueError, match=REJECTED):
            responder.read(bytes(32) + bytes(16))
    else:
        responder.read(initiator.write())
        with pytest.raises(ValueError, match=REJECTED):
            initiator.read(bytes(32) + bytes(16))


def test_repr_hides_secrets() -> None:
    initiator, _ = handshakes()
    initiator.write()
    assert repr(initiator).startswith("<cgd.secagg.noise.Handshake object")
    assert initiator._state._chaining_key.hex() not in repr(initiator._state)
