"""Ports for programs that are about to start."""

import random
import socket
from contextlib import suppress

# Below those that systems give to outgoing connections. Of these, a rank that looks for rank 0 before that one listens
# may be given the very port that it looks for, which connects it with itself.
_PORTS = range(20000, 32768)


def free_port() -> int:
    """Return a port of this host that nobody listens on."""
    drawn = random.SystemRandom()  # whatever seed a test has set
    while True:
        port = drawn.choice(_PORTS)
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
