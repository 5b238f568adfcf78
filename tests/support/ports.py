"""Free ports on the loopback interface."""

from __future__ import annotations

import os
import random
import socket
from collections import deque

# Below the range of ephemeral ports, where a port that is free now may be taken by any outgoing connection.
MIN_PORT, MAX_PORT = 20_000, 32_000
# Workers of pytest-xdist use different ports.
MAX_WORKERS, WORKER = 8, int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 8
_recent: deque[int] = deque(maxlen=100)


def free_port() -> int:
    """Return a port that is free now and was not returned recently."""
    while True:
        port = random.SystemRandom().randrange(MIN_PORT, MAX_PORT, MAX_WORKERS) + WORKER
        if port in _recent:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            _recent.append(port)
            return port
