"""Sealed messages: only the other end reads them, and whatever is done to them on the way is noticed."""

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
from cgd.network.sealing import (
    MAX_ANSWERED,
    MAX_HANDSHAKES,
    MAX_SESSIONS,
    MAX_UNANSWERED,
    PREFIX_BYTES,
    Channel,
    ForeignError,
    Kind,
    Sealing,
)
from cgd.protocol.noise import SymmetricState, agree

PAIRS = {name: zmq.curve_keypair() for name in ("a", "b", "c")}
PUBLIC = {name: public for name, (public, _) in PAIRS.items()}
SECRET = b"what nobody else may read"


def process(name: str, keys: dict[str, bytes] = PUBLIC) -> Sealing:
    return Sealing(name, PAIRS[name][1], dict(keys))


def shake(initiator: Channel, responder: Channel) -> tuple[bytes, bytes]:
    """Complete a handshake; its messages."""
    first = initiator.begin()
    second = responder.open(first, 1).answer
    assert second is not None
    assert initiator.open(second, 1).content is None
    return first, second


class Ends:
    """a's and b's ends, in one life of each, with a session that a began."""

    def __init__(self, a: Sealing | None = None, b: Sealing | None = None) -> None:
        self.a, self.b = a or process("a"), b or process("b")
        self.out: Channel = self.a.with_peer("b")
        self.into: Channel = self.b.with_peer("a")
        self.handshake = shake(self.out, self.into)

    def seal(self, content: bytes = SECRET, connection: int = 1) -> bytes:
        sealed = self.out.seal(content, self.b.process, connection)
        assert sealed is not None
        return sealed


@given(st.binary(max_size=300))
def test_what_is_sealed_is_opened_by_the_other_end(content: bytes) -> None:
    ends = Ends()
    opened = ends.into.open(ends.seal(content), 1)
    assert (opened.content, opened.process) == (content, ends.a.process)
    sealed = ends.into.seal(content, ends.a.process, 1)
    assert sealed is not None
    back = ends.out.open(sealed, 1)
    assert (back.content, back.process) == (content, ends.b.process)


def test_nothing_of_the_content_is_to_be_seen_and_nothing_twice() -> None:
    ends = Ends()
    sealed = [ends.seal() for _ in range(50)]
    assert not any(SECRET[i : i + 4] in each for each in sealed for i in range(len(SECRET) - 4))
    assert len({each[PREFIX_BYTES:] for each in sealed}) == len(sealed)
    assert not any(each.process in message for each in (ends.a, ends.b) for message in ends.handshake)


def bent(ends: Ends, kind: Kind) -> tuple[Channel, bytes]:
    """A message that was not delivered yet, and whom it is for."""
    if kind is Kind.TRANSPORT:
        ends.into.open(ends.seal(), 1)
        return ends.into, ends.seal()
    first = ends.out.begin()
    if kind is Kind.FIRST:
        return ends.into, first
    second = ends.into.open(first, 1).answer
    assert second is not None
    return ends.out, second


@settings(max_examples=300)
@given(st.data(), st.sampled_from(Kind))
def test_any_altered_byte_is_noticed(data: st.DataObject, kind: Kind) -> None:
    ends = Ends()
    into, message = bent(ends, kind)
    sealed = bytearray(message)
    place = data.draw(st.integers(0, len(sealed) - 1))
    sealed[place] ^= data.draw(st.integers(1, 255))
    renamed = 16 <= place < 24 and kind is not Kind.FIRST
    retyped = place == 5 and sealed[5] == Kind.TRANSPORT
    if renamed or retyped:  # a message of a session that does not exist has the same effect as a lost message
        assert into.open(bytes(sealed), 1).stale
        return
    # The version and the fingerprint may be those of an honest participant with another program or file.
    foreign = place == 4 or 8 <= place < 16
    with pytest.raises(ForeignError if foreign else HubError):
        into.open(bytes(sealed), 1)
    assert into.open(message, 1).stale is False  # what is right is taken after it


def test_messages_whose_session_is_altered_count_as_lost() -> None:
    ends = Ends()
    ends.into.open(ends.seal(), 1)
    with pytest.raises(HubError, match="loses messages from a: [0-9]+ so far, and it goes on"):
        for _ in range(1000):
            sealed = ends.seal()
            assert ends.into.open(sealed[:16] + bytes(8) + sealed[24:], 1).stale
            ends.into.open(ends.seal(), 1)


@given(st.integers(0, 140), st.sampled_from(Kind))
def test_what_is_cut_off_is_noticed(length: int, kind: Kind) -> None:
    into, message = bent(Ends(), kind)
    with pytest.raises(HubError, match="altered a message from"):
        into.open(message[: min(length, len(message) - 1)], 1)


def test_swapped_senders_and_recipients_are_told() -> None:
    a, b, c = process("a"), process("b"), process("c")
    for one, other in ((a, b), (c, b), (a, c)):
        shake(one.with_peer(other.me), other.with_peer(one.me))

    def message(sender: Sealing, recipient: Sealing, begin: bool) -> bytes:
        channel = sender.with_peer(recipient.me)
        return channel.begin() if begin else channel.seal(SECRET, recipient.process, 1) or b""

    for begin in (True, False):
        with pytest.raises(HubError, match="swapped messages: .* as a message from a is one from c to b"):
            b.with_peer("a").open(message(c, b, begin), 1)
        with pytest.raises(HubError, match="swapped messages: .* is one from a to c"):
            b.with_peer("a").open(message(a, c, begin), 1)
    with pytest.raises(HubError, match="swapped messages: .* is one from b to a"):
        b.with_peer("a").open(b.with_peer("a").begin(), 1)


def test_a_repeated_message_is_told_even_after_a_new_connection() -> None:
    ends = Ends()
    first, second = ends.seal(), ends.seal()
    later = ends.seal(connection=2)
    for each in (first, second, later):
        ends.into.open(each, 1)
    for each in (first, second, later):
        with pytest.raises(HubError, match="repeated or reordered messages from a"):
            ends.into.open(each, 1)


def test_reordered_messages_are_told() -> None:
    ends = Ends()
    first, second = ends.seal(), ends.seal()
    ends.into.open(second, 1)
    with pytest.raises(HubError, match="repeated or reordered messages from a"):
        ends.into.open(first, 1)


@pytest.mark.parametrize("which", [0, 1])
def test_a_repeated_message_of_a_handshake_is_told_and_the_session_goes_on(which: int) -> None:
    ends = Ends()
    ends.into.open(ends.seal(), 1)
    with pytest.raises(HubError, match="repeated or reordered messages from"):
        (ends.into, ends.out)[which].open(ends.handshake[which], 1)
    assert ends.into.open(ends.seal(), 1).content == SECRET
    assert ends.into.process == ends.a.process


# Who is there, and who only seems to be.


def test_a_first_message_changes_nothing_until_its_session_is_used() -> None:
    """It may be an old one. Only the first transport message proves that the peer is there now."""
    ends = Ends()
    ends.into.open(ends.seal(), 1)
    reborn = process("a")
    second = ends.into.open(reborn.with_peer("b").begin(), 1).answer
    assert second is not None
    assert ends.into.process == ends.a.process
    assert ends.into.open(ends.seal(), 1).content == SECRET
    reborn.with_peer("b").open(second, 1)
    sealed = reborn.with_peer("b").seal(SECRET, ends.b.process, 1)
    assert sealed is not None
    assert ends.into.open(sealed, 1).process == reborn.process
    assert ends.into.process == reborn.process


def test_what_was_recorded_of_a_former_life_does_nothing_to_a_new_process() -> None:
    ends = Ends()
    recorded = [ends.handshake[0], *(ends.seal() for _ in range(3))]
    reborn = process("b").with_peer("a")
    answer = reborn.open(recorded[0], 1).answer  # it cannot be told from one that is made now
    assert answer is not None
    for each in recorded[1:]:  # but what is said in the session needs the keys of the old one
        assert reborn.open(each, 1).stale
    assert reborn.process == b""
    assert reborn.seal(SECRET, ends.a.process, 1) is None
    assert process("a").with_peer("b").open(answer, 1).stale


def test_replayed_first_messages_do_not_disturb_a_running_session() -> None:
    """Not even so many that older ones are forgotten."""
    old = [process("a").with_peer("b").begin() for _ in range(3 * MAX_HANDSHAKES)]
    ends = Ends()
    ends.into.open(ends.seal(), 1)
    for each in old:
        assert ends.into.open(each, 1).answer is not None
    ends.into._answered.clear()  # as after more than it remembers
    for each in (*old, ends.handshake[0]):
        ends.into.open(each, 1)
    assert ends.into.process == ends.a.process
    assert ends.into.open(ends.seal(), 1).content == SECRET


class Impersonator:
    """Somebody with b's secret key, and not a's, who wants b to take it for a; it computes whatever it can."""

    def __init__(self) -> None:
        self.victim = X25519PrivateKey.from_private_bytes(z85.decode(PAIRS["b"][1]))
        self.ephemeral = X25519PrivateKey.generate()
        self.a, self.b = z85.decode(PUBLIC["a"]), z85.decode(PUBLIC["b"])

    def begin(self) -> bytes:
        """The first message, as a would write it: es and ss can be computed with b's secret key."""
        self.state = SymmetricState(process("a").with_peer("b")._out_prologue)
        public = self.ephemeral.public_key().public_bytes_raw()
        for each in (self.a, self.b, public):
            self.state.mix_hash(each)
        self.state.mix_key(agree(self.ephemeral, self.b))
        self.state.mix_key(agree(self.victim, self.a))
        header = process("a").with_peer("b").begin()[:16] + public[:8] + bytes(8)
        return header + public + self.state.encrypt_and_hash(b"impostor")

    def keys_after(self, second: bytes, guess: bytes) -> tuple[bytes, bytes]:
        """The session's keys, with a guess for se, which takes a's secret key or b's ephemeral one."""
        theirs = second[PREFIX_BYTES : PREFIX_BYTES + 32]
        self.state.mix_hash(theirs)
        self.state.mix_key(agree(self.ephemeral, theirs))
        self.state.mix_key(guess)
        return self.state.split()


def test_whoever_has_our_secret_key_cannot_speak_to_us_as_somebody_else() -> None:
    """Key-compromise impersonation: the first message passes, and nothing comes of it."""
    into = process("b").with_peer("a")
    impostor = Impersonator()
    first = impostor.begin()
    second = into.open(first, 1).answer
    assert second is not None
    theirs = second[PREFIX_BYTES : PREFIX_BYTES + 32]
    for guess in (
        agree(impostor.victim, theirs),
        agree(impostor.victim, impostor.a),
        agree(impostor.ephemeral, theirs),
    ):
        key, _ = impostor.keys_after(second, guess)
        header = first[:5] + bytes([Kind.TRANSPORT]) + first[6:PREFIX_BYTES]
        assert into.open(header + AESGCM(key).encrypt(bytes(12), SECRET, header), 1).stale
    assert into.process == b""


def test_whoever_has_our_secret_key_cannot_answer_us_as_somebody_else() -> None:
    into = process("b").with_peer("a")
    first = into.begin()
    impostor = Impersonator()
    # es takes a's secret key or b's ephemeral one; what is known instead:
    guesses = (agree(impostor.victim, impostor.a), agree(impostor.victim, first[PREFIX_BYTES : PREFIX_BYTES + 32]))
    for guess in guesses:
        state = SymmetricState(into._out_prologue)
        for each in (impostor.b, impostor.a, first[PREFIX_BYTES : PREFIX_BYTES + 32]):
            state.mix_hash(each)
        state.mix_key(guess)
        state.mix_key(agree(impostor.victim, impostor.a))
        state.mix_hash(first[PREFIX_BYTES + 32 :])
        public = impostor.ephemeral.public_key().public_bytes_raw()
        state.mix_hash(public)
        state.mix_key(agree(impostor.ephemeral, first[PREFIX_BYTES : PREFIX_BYTES + 32]))
        state.mix_key(agree(impostor.ephemeral, impostor.b))
        header = first[:5] + bytes([Kind.SECOND]) + first[6:8] + into._in_print + first[16:PREFIX_BYTES]
        with pytest.raises(HubError, match="its seal is broken"):
            into.open(header + public + state.encrypt_and_hash(b"impostor"), 1)
    assert into.process == b""


def test_both_may_begin_at_once() -> None:
    a, b = process("a"), process("b")
    one, other = a.with_peer("b"), b.with_peer("a")
    from_a, from_b = one.begin(), other.begin()
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


def test_a_hello_begins_a_handshake_if_nobody_answers() -> None:
    ends = Ends()
    fresh = process("a").with_peer("b")
    assert [each[5] for each in fresh.seal_hello(b"hello", 1)] == [Kind.FIRST]
    for _ in range(MAX_UNANSWERED):
        assert [each[5] for each in ends.out.seal_hello(b"hello", 1)] == [Kind.TRANSPORT]
    sealed, first = ends.out.seal_hello(b"hello", 1)
    assert (sealed[5], first[5]) == (Kind.TRANSPORT, Kind.FIRST)
    ends.into.open(sealed, 1)
    back = ends.into.seal(b"welcome", ends.a.process, 1)
    assert back is not None
    ends.out.open(back, 1)
    assert len(ends.out.seal_hello(b"hello", 1)) == 1


def test_what_is_kept_is_bounded() -> None:
    ends = Ends()
    for _ in range(3 * MAX_SESSIONS):
        peer = process("a")
        shake(peer.with_peer("b"), ends.into)
        ends.into.open(peer.with_peer("b").seal(b"", ends.b.process, 1) or b"", 1)
        ends.into.begin()
    for _ in range(3 * MAX_HANDSHAKES):
        ends.into.open(ends.out.begin(), 1)
    assert len(ends.into._sessions) == MAX_SESSIONS
    assert len(ends.into._offered) == len(ends.into._begun) == MAX_HANDSHAKES
    assert len(ends.into._answered) <= MAX_ANSWERED


def test_a_handshake_that_names_no_process_is_refused() -> None:
    odd = process("a")
    odd.process = b"x" * 9
    with pytest.raises(ForeignError, match="names a process by 9 bytes instead of 8"):
        process("b").with_peer("a").open(odd.with_peer("b").begin(), 1)


def test_a_public_key_of_small_order_is_refused() -> None:
    with pytest.raises(InputError, match="the public key of b, .* cannot be used; it needs a new one"):
        process("a", PUBLIC | {"b": z85.encode(bytes(32))}).with_peer("b")


# Lives and connections.


def test_what_is_left_of_a_connection_that_broke_is_late_and_nobodys_fault() -> None:
    ends = Ends()
    ends.into.open(ends.seal(), 1)
    left = ends.seal()
    ends.into.open(ends.seal(connection=2), 1)
    assert ends.into.open(left, 1).content is None
    assert ends.into.open(ends.seal(connection=2), 1).content == SECRET


def test_what_is_meant_for_another_life_is_stale_and_nobodys_fault() -> None:
    ends = Ends()
    sealed = ends.seal()
    reborn = process("b").with_peer("a")
    for _ in range(2):
        assert reborn.open(sealed, 1).stale


def test_another_file_is_not_the_hubs_fault() -> None:
    other = process("a", PUBLIC | {"b": zmq.curve_keypair()[0]})
    renamed = process("a", PUBLIC | {"beth": PUBLIC["b"]})
    for sealed in (other.with_peer("b").begin(), renamed.with_peer("beth").begin()):
        with pytest.raises(ForeignError, match="under other keys than our federation file has"):
            process("b").with_peer("a").open(sealed, 1)


def test_another_version_is_not_the_hubs_fault() -> None:
    sealed = process("a").with_peer("b").begin()
    with pytest.raises(ForeignError, match="its seals are of version 1, ours of 2; install the same cgd"):
        process("b").with_peer("a").open(sealed[:4] + b"\1" + sealed[5:], 1)


def test_without_a_participants_key_nobody_can_speak_for_it() -> None:
    """The hub knows all public keys, the fingerprint, and what it has seen; not the secret that the two have."""
    forger = Sealing("a", zmq.curve_keypair()[1], PUBLIC)
    with pytest.raises(HubError, match="altered a message from a: its seal is broken"):
        process("b").with_peer("a").open(forger.with_peer("b").begin(), 1)


def test_both_static_keys_are_not_enough_to_read() -> None:
    """Whoever gets both static keys later still cannot read what was recorded."""
    ends = Ends()
    sealed = ends.seal()
    thief = process("b").with_peer("a")
    thief.open(ends.handshake[0], 1)
    opened = thief.open(sealed, 1)
    assert opened.stale
    assert opened.content is None


def test_a_channel_that_is_asked_for_again_goes_on() -> None:
    """A peer may be removed and come back in one life of ours."""
    ends = Ends()
    ends.into.open(ends.seal(), 1)
    assert ends.a.with_peer("b") is ends.out
    assert ends.into.open(ends.seal(), 1).content == SECRET
    ends.a.public_keys["b"] = zmq.curve_keypair()[0]
    assert ends.a.with_peer("b") is not ends.out


def lossy(rate: float, count: int, seed: int = 1) -> int | None:
    """After how many messages it is told that so many get lost; None if it is not."""
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


def test_losses_that_go_on_are_told_and_few_are_not() -> None:
    assert lossy(0.0, 2000) is None
    assert lossy(0.05, 5000) is None
    told = lossy(0.5, 5000)
    assert told is not None
    assert told < 1500
    assert (lossy(0.9, 5000) or 5000) < 1500


def test_a_long_silence_is_forgiven() -> None:
    ends = Ends()
    ends.into.open(ends.seal(b""), 1)
    for _ in range(10_000):
        ends.seal(b"")
    ends.into.open(ends.seal(b""), 1)
    assert ends.into.lost == 10_000


@pytest.mark.parametrize("whose", ["ours", "theirs"])
def test_what_is_lost_while_connections_are_made_anew_does_not_count(whose: str) -> None:
    ends = Ends()
    for round_ in range(1, 100):
        theirs = round_ if whose == "theirs" else 1
        ends.into.open(ends.seal(b"", theirs), round_)
        for _ in range(20):
            ends.seal(b"", theirs)
    assert ends.into.lost == 0


def test_secrets_are_not_shown() -> None:
    shown = repr(process("a")) + repr(Ends().out) + repr(Ends().out._sessions)
    assert PAIRS["a"][1].decode() not in shown
    assert z85.decode(PAIRS["a"][1]).hex() not in shown
