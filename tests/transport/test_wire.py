"""What travels between members: no gradient, and not more than there is room for."""

from __future__ import annotations

import tracemalloc
from typing import TYPE_CHECKING

import numpy as np
import pytest

from cgd import FixedPoint, local_peers
from cgd.peers import SumSettings
from cgd.secagg.codec import from_bytes
from cgd.secagg.masking import seal
from cgd.secagg.messages import SHARINGS, RevealKey
from cgd.transport.memory import connect
from support.transports import MEMBERS, BentTransport, custom_peers
from support.wire import MEMBER_OPENINGS

if TYPE_CHECKING:
    from cgd.secagg.messages import Opening, Sharing
    from cgd.transport.base import Transport


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("opening", MEMBER_OPENINGS)
def test_no_frame_contains_an_encoded_gradient(sharing: Sharing, opening: Opening) -> None:
    settings = SumSettings(sharing=sharing, opening=opening, aggregator="a" if opening == "aggregator" else "")
    gradients = [np.random.default_rng(i).normal(size=300).astype(np.float32) for i in range(3)]
    tap: list[bytes] = []

    def keep(frame: bytes) -> bytes:
        tap.append(frame)
        return frame

    transports: list[Transport] = [BentTransport(transport, keep) for transport in connect(MEMBERS)]
    with custom_peers(transports, [settings] * 3) as colony:
        totals = colony.run(lambda peers, own: peers.sum(own), gradients)
    fixed_point = FixedPoint.for_sum(addends=3, bound=16.0)
    traces = [[fixed_point.encode(gradient), gradient, gradient.astype(np.float64)] for gradient in gradients]
    for trace in (piece for kinds in traces for piece in kinds):
        # Three neighbours in a row: by chance they turn up once in 2^96.
        pieces = [trace[i : i + 3].tobytes() for i in range(len(trace) - 2)]
        assert not any(piece in frame for frame in tap for piece in pieces)
    words = np.add.reduce([fixed_point.encode(gradient) for gradient in gradients], dtype=np.uint32)
    assert np.array_equal(fixed_point.decode(words, np.float32), totals[0])
    assert not any(words[10:13].tobytes() in frame for frame in tap)  # the total itself travels under seals
    keys = {said.key for frame in tap if isinstance(said := from_bytes(frame, "anyone").message, RevealKey)}
    for key in keys:
        seal(words, key)
    assert len(keys) == 3
    assert any(words[10:13].tobytes() in frame for frame in tap)  # the search does find what is there


@pytest.mark.parametrize("sharing", SHARINGS)
def test_memory_does_not_grow_with_the_number_of_members_squared(sharing: Sharing) -> None:
    """All members of a process together stay within a few vectors each."""
    size = 500_000
    peaks = []
    for count in (4, 16):
        values = np.ones(size, dtype=np.float32)
        with local_peers(count, sharing=sharing) as colony:
            tracemalloc.start()
            colony.run(lambda peers, own=values: float(peers.sum(own)[0]))
            peaks.append(tracemalloc.get_traced_memory()[1] / count / (4 * size))
            tracemalloc.stop()
    inboxes = (16 << 20) / (4 * size)  # each may hold this many vectors
    assert max(peaks) < 6 + inboxes
