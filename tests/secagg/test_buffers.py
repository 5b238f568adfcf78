"""Memory that is used again: messages keep their bytes as long as anything refers to them."""

from __future__ import annotations

import gc
import os
import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cgd.secagg.buffers import MAX_FREE_BYTES, MIN_BYTES, ROOM, BufferPool

sizes = st.sampled_from([0, 1, MIN_BYTES - 1, MIN_BYTES, MIN_BYTES + 1, 3 * MIN_BYTES])


@settings(deadline=None, max_examples=50)
@given(sizes, st.lists(st.integers(0, ROOM), max_size=6))
def test_headers_are_put_before_a_message(size: int, headers: list[int]) -> None:
    pool, expected = BufferPool(), os.urandom(size)
    message = pool.join(expected)
    for length in headers:
        header = os.urandom(length)
        message, expected = pool.join(header, message), header + expected
        assert bytes(message) == expected


def test_second_header_of_a_message_does_not_change_the_first() -> None:
    """A link sends a frame again with another header, while a socket may still hold the first message."""
    pool, content = BufferPool(), os.urandom(MIN_BYTES)
    frame = pool.join(content)
    first, second, third = (pool.join(header, frame) for header in (b"first ", b"second ", b"third "))
    assert bytes(first) == b"first " + content
    assert bytes(second) == b"second " + content
    assert bytes(third) == b"third " + content
    assert bytes(frame) == content


def test_messages_keep_their_bytes_while_memory_is_used_again() -> None:
    pool, rng = BufferPool(), random.Random(1)
    kept: list[tuple[bytes, object]] = []
    for _ in range(300):
        content = rng.randbytes(rng.choice([10, MIN_BYTES, 2 * MIN_BYTES + 7]))
        message: object = pool.join(b"head", content)
        if rng.random() < 0.5:
            message = np.frombuffer(memoryview(message)[4:], dtype=np.uint8)  # type: ignore[arg-type]
        kept.append((content, message))
        if rng.random() < 0.6:
            kept.pop(rng.randrange(len(kept)))
        del message
        for expected, each in kept:
            assert bytes(each)[-len(expected) :] == expected  # type: ignore[call-overload]


def test_memory_is_used_again_and_a_limited_amount_is_kept() -> None:
    pool = BufferPool()
    for _ in range(5):
        messages = [pool.join(b"x", bytes(1 << 20)) for _ in range(40)]
        del messages
        gc.collect()
        free = [each for sizes in pool._free.values() for each in sizes]
        assert 0 < sum(each.nbytes for each in free) <= MAX_FREE_BYTES
    message = pool.join(b"x", bytes(1 << 20))
    assert len(free) - 1 == sum(map(len, pool._free.values()))
    assert len(message) == 1 + (1 << 20)
    assert isinstance(message, memoryview)
    assert message.readonly


def test_small_messages_occupy_no_more_than_their_bytes() -> None:
    pool = BufferPool()
    assert isinstance(pool.join(b"head", bytes(100)), bytes)
    assert pool.take(100).nbytes == 100
    assert not pool._free
