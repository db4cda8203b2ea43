"""Ports for programs that are about to start."""

import random
import socket

# Below those that systems give to outgoing connections, which would take such a port before the program has it.
_PORTS = range(20000, 25000)


def free_port() -> int:
    """Return a port on which nobody listens on this host."""
    drawn = random.SystemRandom()  # whatever seed a test has set
    while True:
        port = drawn.choice(_PORTS)
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)):
                return port
