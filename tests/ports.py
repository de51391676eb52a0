"""Ports for services that tests start, kill and start again."""

import random
import socket
from pathlib import Path

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""From which the kernel takes the ports of outgoing connections and of those who ask for any."""
LEAST = 20_000
"""Below are those that Ray gives to its workers."""


def free_port() -> int:
    """A port on which nobody listens, and which nobody else is given while its service is away."""
    lowest = int(RANGE.read_text().split()[0]) if RANGE.exists() else LEAST
    ports = range(LEAST, lowest)
    # Not from the generator that tests seed: two processes of one seed would take the same.
    for port in random.SystemRandom().sample(ports, min(len(ports), 100)):
        if not _taken(port):
            return port
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def _taken(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return True
    return False
