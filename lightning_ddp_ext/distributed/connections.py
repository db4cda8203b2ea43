"""Connections of process groups, so that whoever waits in a collective can be made to stop waiting.

gloo cannot abort a collective: a thread that waits for a rank that does not come does so until the time limit, and the
group cannot be destroyed before. When its sockets are shut down, it gives up at once, here and on the other ranks.
"""

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Iterator

_FOLDERS = ("/proc/self/fd", "/dev/fd")  # Linux, and other systems

# Of Linux's `struct tcp_info`, where `tcpi_bytes_received` begins.
_BYTES_RECEIVED = struct.Struct("=128xQ")

_Connection = tuple[int, int]  # file descriptor, and the number of the socket, since descriptors are used again

_tracked: dict[_Connection, bool] = {}
_spared_ports: set[int] = set()
_has_broken = False


@contextlib.contextmanager
def tracked_connections(lasting: bool = False) -> Iterator[None]:
    """Remember the sockets that a block opens; for blocks that make a process group or connect to a store.

    Args:
        lasting: Whether they are to outlast a run.
    """
    before = _list_sockets()
    yield
    now = _list_sockets()
    for gone in _tracked.keys() - now:
        _tracked.pop(gone, None)
    _tracked.update(dict.fromkeys(now - before, lasting))


def break_connections(lasting: bool = False) -> int:
    """Shut down the remembered sockets. Whoever waits for one, in any thread, gets an error.

    Args:
        lasting: Whether those are concerned too that were to outlast a run.

    Returns:
        How many connections were shut down.
    """
    global _has_broken
    _has_broken = True
    broken = 0
    for connection, stays in list(_tracked.items()):
        if lasting or not stays:
            broken += _shut_down(*connection)
            _tracked.pop(connection, None)
    return broken


def break_rest() -> None:
    """Shut down what is left, if anything has been; for the end of a process, which must not wait for other ranks."""
    if _has_broken:
        break_connections(lasting=True)


def spare_port(port: int) -> None:
    """Leave connections to a port of this process alone, such as a store, in which others look what is wrong.

    Args:
        port: The port.
    """
    _spared_ports.add(port)


def count_received(but_port: int | None) -> int | None:
    """Count the bytes that have come over all connections of this process that are open.

    Args:
        but_port: A port, here or there, whose connections are left out.

    Returns:
        The number; None if the system does not tell.
    """
    if not hasattr(socket, "TCP_INFO"):  # only Linux has it
        return None
    try:
        return sum(_count_bytes(descriptor, but_port) for descriptor, _ in _list_sockets())
    except OSError:  # no descriptor is left to look with
        return None


def _count_bytes(descriptor: int, but_port: int | None) -> int:
    with contextlib.suppress(OSError, struct.error), _duplicate(descriptor) as connection:
        if _is_tcp(connection) and but_port not in (connection.getsockname()[1], connection.getpeername()[1]):
            told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED.size)
            return int(_BYTES_RECEIVED.unpack(told)[0])
    return 0


def _duplicate(descriptor: int) -> socket.socket:
    """Return a socket that can be closed without closing the owner's.

    Said to be non-blocking, so that Python does not set a flag that both share to what `socket.setdefaulttimeout` says.
    """
    kind = socket.SOCK_STREAM | getattr(socket, "SOCK_NONBLOCK", 0)
    return socket.socket(type=kind, fileno=os.dup(descriptor))


def _is_tcp(connection: socket.socket) -> bool:
    is_internet = connection.family in (socket.AF_INET, socket.AF_INET6)
    return is_internet and connection.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE) == socket.SOCK_STREAM


def _shut_down(descriptor: int, number: int) -> bool:
    with contextlib.suppress(OSError):  # it has been closed meanwhile
        if os.fstat(descriptor).st_ino != number:
            return False
        # A shutdown concerns the connection, whose duplicate this is.
        with _duplicate(descriptor) as connection:
            if _may_break(connection):
                connection.shutdown(socket.SHUT_RDWR)
                return True
    return False


def _may_break(connection: socket.socket) -> bool:
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    is_listening = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    return not is_listening and connection.getsockname()[1] not in _spared_ports


def _list_sockets() -> set[_Connection]:
    folder = next((folder for folder in _FOLDERS if os.path.isdir(folder)), None)
    found = set()
    for name in [] if folder is None else os.listdir(folder):
        with contextlib.suppress(OSError):  # such as the descriptor of the folder itself
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found.add((int(name), status.st_ino))
    return found
