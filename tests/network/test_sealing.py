"""Sealed messages: only the other end reads them, and whatever is done to them on the way is noticed."""

from __future__ import annotations

import random

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from zmq.utils import z85

from cgd.errors import HubError
from cgd.network import sealing as module
from cgd.network.sealing import NOBODY, PREFIX_BYTES, Channel, ForeignError, Sealing

PAIRS = {name: zmq.curve_keypair() for name in ("a", "b", "c")}
PUBLIC = {name: public for name, (public, _) in PAIRS.items()}
SECRET = b"what nobody else may read"


def process(name: str, keys: dict[str, bytes] = PUBLIC) -> Sealing:
    return Sealing(name, PAIRS[name][1], dict(keys))


class Ends:
    """a's and b's ends, in one life of each."""

    def __init__(self, a: Sealing | None = None, b: Sealing | None = None) -> None:
        self.a, self.b = a or process("a"), b or process("b")
        self.out: Channel = self.a.with_peer("b")
        self.into: Channel = self.b.with_peer("a")

    def seal(self, content: bytes = SECRET, connection: int = 1) -> bytes:
        return self.out.seal(content, self.b.ephemeral.public, connection)


@given(st.binary(max_size=300), st.booleans())
def test_what_is_sealed_is_opened_by_the_other_end(content: bytes, hello: bool) -> None:
    ends = Ends()
    to = NOBODY if hello else ends.b.ephemeral.public
    opened = ends.into.open(ends.out.seal(content, to, 1), 1)
    assert (opened.content, opened.fresh, opened.process) == (content, not hello, ends.a.ephemeral.public)
    back = ends.out.open(ends.into.seal(content, ends.a.ephemeral.public, 1), 1)
    assert back.content == content


def test_nothing_of_the_content_is_to_be_seen_and_nothing_twice() -> None:
    ends = Ends()
    sealed = [ends.seal() for _ in range(50)]
    assert not any(SECRET[i : i + 4] in each for each in sealed for i in range(len(SECRET) - 4))
    assert len({each[PREFIX_BYTES:] for each in sealed}) == len(sealed)


@settings(max_examples=300)
@given(st.data(), st.booleans())
def test_any_altered_byte_is_noticed(data: st.DataObject, hello: bool) -> None:
    ends = Ends()
    sealed = bytearray(ends.out.seal(SECRET, NOBODY if hello else ends.b.ephemeral.public, 1))
    place = data.draw(st.integers(0, len(sealed) - 1))
    sealed[place] ^= data.draw(st.integers(1, 255))
    # The version and the fingerprint may be those of an honest participant with another program or file.
    foreign = place == 4 or 8 <= place < 16
    with pytest.raises(ForeignError if foreign else HubError):
        ends.into.open(bytes(sealed), 1)


@given(st.integers(0, 140))
def test_what_is_cut_off_is_noticed(length: int) -> None:
    ends = Ends()
    sealed = ends.seal()
    with pytest.raises(HubError, match="altered a message from a"):
        ends.into.open(sealed[: min(length, len(sealed) - 1)], 1)


def test_swapped_senders_and_recipients_are_told() -> None:
    a, b, c = process("a"), process("b"), process("c")
    from_c = c.with_peer("b").seal(SECRET, b.ephemeral.public, 1)
    with pytest.raises(HubError, match="swapped messages: .* as a message from a is one from c to b"):
        b.with_peer("a").open(from_c, 1)
    for_c = a.with_peer("c").seal(SECRET, c.ephemeral.public, 1)
    with pytest.raises(HubError, match="swapped messages: .* is one from a to c"):
        b.with_peer("a").open(for_c, 1)
    ours = b.with_peer("a").seal(SECRET, a.ephemeral.public, 1)
    with pytest.raises(HubError, match="swapped messages: .* is one from b to a"):
        b.with_peer("a").open(ours, 1)


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


def test_a_hello_of_before_is_told_as_repeated() -> None:
    ends = Ends()
    hello = ends.out.seal(b"hello", NOBODY, 1)
    ends.into.open(hello, 1)
    restarted = Ends(b=ends.b)
    ends.into.open(restarted.out.seal(b"hello", NOBODY, 1), 1)
    with pytest.raises(HubError, match="repeated"):
        ends.into.open(hello, 1)


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
    reborn = Ends(ends.a)
    assert reborn.into.open(sealed, 1).content is None
    with pytest.raises(HubError, match="repeated"):  # but it counts
        reborn.into.open(sealed, 1)


def test_another_file_is_not_the_hubs_fault() -> None:
    other = process("a", PUBLIC | {"b": zmq.curve_keypair()[0]})
    renamed = process("a", PUBLIC | {"beth": PUBLIC["b"]})
    for sealed in (other.with_peer("b").seal(SECRET, NOBODY, 1), renamed.with_peer("beth").seal(SECRET, NOBODY, 1)):
        with pytest.raises(ForeignError, match="under other keys than our federation file has"):
            process("b").with_peer("a").open(sealed, 1)


def test_without_a_participants_key_nobody_can_speak_for_it() -> None:
    """The hub knows all public keys, the fingerprint, and what it has seen; not the secret that the two have."""
    forger = Sealing("a", zmq.curve_keypair()[1], PUBLIC)
    with pytest.raises(HubError, match="altered a message from a: its header is not what a wrote"):
        process("b").with_peer("a").open(forger.with_peer("b").seal(SECRET, NOBODY, 1), 1)


def test_both_ephemeral_keys_are_needed_to_read() -> None:
    """Whoever gets both static keys later still cannot read what was recorded."""
    ends = Ends()
    sealed = ends.seal()
    thief = Ends(process("a"), process("b")).into
    header = ends.a.ephemeral.public, thief._own.ephemeral.public
    with pytest.raises(HubError, match="its seal is broken"):
        # Even if the thief pretends that the message is for a process of its own.
        forged = sealed[:48] + header[1] + sealed[80:88]
        proof = module._prove(thief._in_proof, forged)
        thief.open(forged + proof + sealed[PREFIX_BYTES:], 1)


def test_a_channel_that_is_asked_for_again_goes_on_counting() -> None:
    """A peer may be removed and come back in one life of ours; no count comes twice under one key."""
    ends = Ends()
    ends.into.open(ends.seal(), 1)
    assert ends.a.with_peer("b") is ends.out
    ends.into.open(ends.a.with_peer("b").seal(SECRET, ends.b.ephemeral.public, 1), 1)
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
    shown = repr(process("a")) + repr(Ends().out) + repr(Ends().a.ephemeral)
    assert PAIRS["a"][1].decode() not in shown
    assert z85.decode(PAIRS["a"][1]).hex() not in shown
