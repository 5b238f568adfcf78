"""The bytes of messages: they survive a round trip, and malformed frames name their sender."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgd.errors import FrameError
from cgd.secagg import messages as protocol
from cgd.secagg.codec import KINDS, Frame, from_bytes, to_bytes

names = st.text(st.characters(categories=["L", "N", "P"]), max_size=20)
specs = st.builds(
    protocol.SumSpec,
    shape=st.lists(st.integers(0, 2**64 - 1), max_size=5).map(tuple),
    dtype=names,
    ring_bits=st.sampled_from([16, 32, 64]),
    fraction_bits=st.integers(0, 255),
    masking=st.sampled_from(protocol.MASKINGS),
    opening=st.sampled_from(protocol.OPENINGS),
    aggregator=names,
)
keys = st.binary(min_size=32, max_size=32)
signatures = st.binary(min_size=64, max_size=64)
tags = st.binary(min_size=16, max_size=16)
texts = st.text(max_size=40).map(str.encode)
counts = st.integers(0, 2**40)


def several(*fields: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(st.tuples(*fields), max_size=4).map(tuple)


messages = st.one_of(
    st.builds(protocol.Ready, specs, keys, st.binary(max_size=4096), signatures),
    *(
        st.builds(kind, st.integers(0, 2**64 - 1), st.binary(max_size=50))
        for kind in (protocol.Share, protocol.Subtotal, protocol.Total)
    ),
    st.builds(protocol.Confirm, keys, signatures),
    st.builds(protocol.RevealKey, st.binary(min_size=16, max_size=16)),
    st.builds(protocol.Abort, st.sampled_from(protocol.Reason)),
    st.just(protocol.Leave()),
    st.builds(protocol.Hello, keys, keys, names, names, counts, several(names, names), signatures),
    st.builds(
        protocol.JournalPosition, texts, signatures, tags, several(names, keys), several(names, keys, signatures)
    ),
    st.builds(protocol.PositionsGathered, keys),
    st.builds(protocol.SignedEvidence, names, keys, several(names, keys, signatures)),
    st.builds(protocol.JournalRequest, names, counts, st.booleans()),
    st.builds(
        lambda start, group, words: protocol.JournalChunk(start, group, start + len(words), words),
        counts,
        names,
        st.binary(),
    ),
    st.builds(protocol.Goodbye, st.booleans(), several(names, counts, keys)),
    st.builds(protocol.Deposit, counts, names, st.just(32), st.binary(min_size=4, max_size=4)),
    st.builds(protocol.Deposit, counts, names, st.just(64), st.binary(min_size=16, max_size=16)),
    st.just(protocol.ResendRequest()),
)
frames = st.builds(Frame, st.binary(min_size=16, max_size=16), st.integers(0, 2**64 - 1), messages)


@given(frames)
def test_frames_survive_a_round_trip(frame: Frame) -> None:
    assert from_bytes(to_bytes(frame), "p1") == frame


@given(frames, st.data())
def test_truncated_or_oversized_frame_names_its_sender(frame: Frame, data: st.DataObject) -> None:
    whole = to_bytes(frame)
    truncated = whole[: data.draw(st.integers(0, len(whole) - 1))]
    oversized = whole + data.draw(st.binary(min_size=1, max_size=9))
    for wrong, error_text in ((truncated, "truncated"), (oversized, "oversized")):
        with pytest.raises(FrameError, match=error_text) as caught:
            from_bytes(wrong, "hospital-c")
        assert caught.value.peer == "hospital-c"


@given(st.binary(max_size=200))
def test_random_bytes_raise_only_frame_errors(data: bytes) -> None:
    with pytest.raises(FrameError):
        from_bytes(data, "p1")


@given(frames, st.data())
def test_frame_with_a_changed_byte_is_read_or_raises_a_frame_error(frame: Frame, data: st.DataObject) -> None:
    changed = bytearray(to_bytes(frame))
    index = data.draw(st.integers(0, len(changed) - 1))
    changed[index] ^= data.draw(st.integers(1, 255))
    try:
        assert isinstance(from_bytes(bytes(changed), "p1"), Frame)
    except FrameError as error:
        assert error.peer == "p1"


@pytest.mark.parametrize(
    ("offset", "value", "error_text"),
    [
        (0, 0x58, "not a frame of cgd"),
        (3, 9, "uses protocol version 9, this member uses 3"),
        (4, 99, "unknown kind 99"),
        (32, 1, "it is not a slice, but has the start 1"),
    ],
)
def test_header_faults_are_reported(offset: int, value: int, error_text: str) -> None:
    changed = bytearray(to_bytes(Frame(bytes(16), 1, protocol.Leave())))
    changed[offset] = value
    with pytest.raises(FrameError, match=error_text):
        from_bytes(bytes(changed), "p1")


def test_every_kind_has_a_unique_number() -> None:
    examples: list[protocol.Message] = [
        protocol.Ready(protocol.SumSpec((1,), "float32", 32, 20, "uniform", "mesh"), bytes(32)),
        protocol.Share(0, b""),
        protocol.Subtotal(0, b""),
        protocol.Total(0, b""),
        protocol.Confirm(bytes(32)),
        protocol.RevealKey(bytes(16)),
        protocol.Abort(protocol.Reason.RANGE),
        protocol.Leave(),
        protocol.Hello(bytes(32), bytes(32), "1.0", "trial", 1, (("training", "abc"),)),
        protocol.JournalPosition(b"[]", bytes(64)),
        protocol.JournalRequest("everyone"),
        protocol.JournalChunk(0, "everyone", 4, b"abcd"),
        protocol.Goodbye(True),
        protocol.Deposit(4, "everyone", 32, bytes(8)),
        protocol.ResendRequest(),
        protocol.SignedEvidence("ready", bytes(32), (("a", bytes(32), bytes(64)),)),
        protocol.PositionsGathered(bytes(32)),
        protocol.KeyShare(bytes(17)),
        protocol.Attendance(3, ("a", "b"), bytes(32), ("c",), begun=True),
        protocol.CompleteSum("everyone", b"[]"),
    ]
    assert [type(example) for example in examples] == list(KINDS)
    assert {to_bytes(Frame(bytes(16), 1, example))[4] for example in examples} == set(range(1, len(KINDS) + 1))


def test_abort_frames_contain_only_a_reason_code() -> None:
    assert all(len(to_bytes(Frame(bytes(16), 1, protocol.Abort(reason)))) == 49 for reason in protocol.Reason)
    assert all(reason.text for reason in protocol.Reason)
