"""Silence: which peers have not been heard for as long as the patience of the federation file."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cgd.secagg.messages import PeerId

MAX_INTERVAL_SECONDS = 1.0
"""Of the time since the last update, no more is counted: this process may have been stopped itself."""


class SilenceClock:
    """Counts for how long each peer has been silent: neither a message nor an answer of its process arrived.

    A peer whose program computes answers all the same, so it is not silent.

    Args:
        patience: the seconds of silence after which a peer counts as absent.
        clock: measures the time.

    Examples:
        >>> now = iter([0.0, 0.5, 1.0, 30.0])
        >>> silence = SilenceClock(0.8, lambda: next(now))
        >>> [sorted(silence.update({"ada": seconds, "ben": 0.1})) for seconds in (0.5, 1.0)]
        [[], ['ada']]
        >>> silence.update({"ada": 0.0, "ben": 29.1})  # this process was stopped for 29 seconds
        frozenset({'ben'})
    """

    def __init__(self, patience: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.patience = patience
        self._clock, self._last = clock, clock()
        self._seconds: dict[PeerId, float] = {}

    def update(self, silent: Mapping[PeerId, float]) -> frozenset[PeerId]:
        """Record for how long each peer has been silent, as measured by its link; return those that are absent."""
        now = self._clock()
        interval, self._last = min(now - self._last, MAX_INTERVAL_SECONDS), now
        before = self._seconds
        self._seconds = {peer: min(seconds, before.get(peer, 0.0) + interval) for peer, seconds in silent.items()}
        return frozenset(peer for peer, seconds in self._seconds.items() if seconds >= self.patience)

    def seconds(self, peer: PeerId) -> float:
        """Return for how long a peer has been silent."""
        return self._seconds.get(peer, 0.0)
