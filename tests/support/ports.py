"""Ports for programs that are about to start."""

import random
import socket
from contextlib import suppress

# Below the ports of outgoing connections: the system could give one of those to a rank that connects to rank 0 before
# rank 0 listens, and the rank would be connected with itself.
_PORTS = range(20000, 32768)


def free_port() -> int:
    """Return a port of this machine on which nobody listens."""
    rng = random.SystemRandom()  # independent of the seed of a test
    while True:
        port = rng.choice(_PORTS)
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
