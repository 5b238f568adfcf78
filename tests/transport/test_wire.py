"""Frames between members contain no gradient, and the memory for them is bounded."""

from __future__ import annotations

import tracemalloc
from typing import TYPE_CHECKING

import numpy as np
import pytest

from cgd import FixedPoint, local_peers
from cgd.peers import SumSettings
from cgd.secagg.codec import from_bytes
from cgd.secagg.masking import add_self_mask
from cgd.secagg.messages import MASKINGS, RevealKey
from cgd.transport.memory import connect
from support.transports import MEMBERS, TamperingTransport, custom_peers
from support.wire import MEMBER_OPENINGS

if TYPE_CHECKING:
    from cgd.secagg.messages import Masking, Opening
    from cgd.transport.base import Transport


@pytest.mark.parametrize("masking", MASKINGS)
@pytest.mark.parametrize("opening", MEMBER_OPENINGS)
def test_no_frame_contains_an_encoded_gradient(masking: Masking, opening: Opening) -> None:
    settings = SumSettings(masking=masking, opening=opening, aggregator="a" if opening == "aggregator" else "")
    gradients = [np.random.default_rng(i).normal(size=300).astype(np.float32) for i in range(3)]
    frames: list[bytes] = []

    def record(frame: bytes) -> bytes:
        frames.append(frame)
        return frame

    transports: list[Transport] = [TamperingTransport(transport, record) for transport in connect(MEMBERS)]
    with custom_peers(transports, [settings] * 3) as members:
        totals = members.run(lambda peers, own: peers.sum(own), gradients)
    fixed_point = FixedPoint.for_sum(addends=3, bound=16.0)
    secrets = [[fixed_point.encode(gradient), gradient, gradient.astype(np.float64)] for gradient in gradients]
    for secret in (each for kinds in secrets for each in kinds):
        # A sequence of three neighbouring words occurs by chance with probability 2^-96.
        pieces = [secret[i : i + 3].tobytes() for i in range(len(secret) - 2)]
        assert not any(piece in frame for frame in frames for piece in pieces)
    words = np.add.reduce([fixed_point.encode(gradient) for gradient in gradients], dtype=np.uint32)
    assert np.array_equal(fixed_point.decode(words, np.float32), totals[0])
    assert not any(words[10:13].tobytes() in frame for frame in frames)  # the total is sent under self-masks
    keys = {each.key for frame in frames if isinstance(each := from_bytes(frame, "a").message, RevealKey)}
    for key in keys:
        add_self_mask(words, key)
    assert len(keys) == 3
    assert any(words[10:13].tobytes() in frame for frame in frames)  # the search does find it without the self-masks


@pytest.mark.parametrize("masking", MASKINGS)
def test_memory_does_not_grow_with_the_number_of_members_squared(masking: Masking) -> None:
    """The members of a process need a few vectors each."""
    size = 500_000
    peaks = []
    for count in (4, 16):
        values = np.ones(size, dtype=np.float32)
        with local_peers(count, masking=masking) as members:
            tracemalloc.start()
            members.run(lambda peers, own=values: float(peers.sum(own)[0]))
            peaks.append(tracemalloc.get_traced_memory()[1] / count / (4 * size))
            tracemalloc.stop()
    inboxes = (16 << 20) / (4 * size)  # each may hold this many vectors
    assert max(peaks) < 6 + inboxes
