"""Free TCP ports on the loopback interface, for the scripts that run federations."""

from __future__ import annotations

import random
import socket

# Below the range from which the operating system takes ports for outgoing connections.
MIN_PORT, MAX_PORT = 20_000, 32_000


def free_ports(count: int) -> list[int]:
    """Return `count` different ports on which no process listens."""
    ports: list[int] = []
    while len(ports) < count:
        port = random.SystemRandom().randrange(MIN_PORT, MAX_PORT)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in ports:
            ports.append(port)
    return ports
