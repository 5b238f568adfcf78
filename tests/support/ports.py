"""Ports on loopback for tests."""

from __future__ import annotations

import os
import random
import socket
from collections import deque

# Below the range from which the system takes ports for outgoing connections: there, one that is free now may be taken
# by any connection before it is bound.
MIN_PORT, MAX_PORT = 20_000, 32_000
# Processes that run tests at the same time take ports of their own.
PROCESSES, OURS = 8, int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 8
_given: deque[int] = deque(maxlen=100)


def free_port() -> int:
    """A port that nobody listens at, a moment ago, and that was not given just before: in a federation they differ."""
    while True:
        port = random.SystemRandom().randrange(MIN_PORT, MAX_PORT, PROCESSES) + OURS
        if port in _given:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            _given.append(port)
            return port
