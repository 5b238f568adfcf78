"""Ports on loopback for tests."""

from __future__ import annotations

import random
import socket

# Below the range from which the system takes ports for outgoing connections: there, one that is free now may be taken
# by any connection before it is bound.
LOWEST, HIGHEST = 20_000, 32_000


def free_port() -> int:
    """A port that nobody listens at, a moment ago."""
    while True:
        port = random.SystemRandom().randrange(LOWEST, HIGHEST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
