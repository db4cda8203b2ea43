"""Sockets of process groups, shut down to end a collective: gloo cannot abort one, but gives up without its sockets."""

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Iterator

_FOLDERS = ("/proc/self/fd", "/dev/fd")  # Linux, and other systems
_BYTES_RECEIVED = struct.Struct("=128xQ")  # `tcpi_bytes_received` of Linux's `struct tcp_info`

_Connection = tuple[int, int]  # file descriptor, and inode of the socket, since descriptors are used again

_tracked: dict[_Connection, bool] = {}  # whether the socket outlasts a run
_spared_ports: set[int] = set()
_has_broken = False


@contextlib.contextmanager
def tracked_connections(lasting: bool = False) -> Iterator[None]:
    """Remember the sockets that are opened in this block; `lasting` ones outlast a run."""
    before = _list_sockets()
    yield
    now = _list_sockets()
    for gone in _tracked.keys() - now:
        _tracked.pop(gone, None)
    _tracked.update(dict.fromkeys(now - before, lasting))


def break_connections(lasting: bool = False) -> int:
    """Shut down the remembered sockets, if `lasting` all of them, so that waiting threads fail; return their number."""
    global _has_broken
    _has_broken = True
    broken = 0
    for connection, outlasts in list(_tracked.items()):
        if lasting or not outlasts:
            broken += _shut_down(*connection)
            _tracked.pop(connection, None)
    return broken


def break_rest() -> None:
    """Shut down the remaining sockets if any were shut down before, so that a process can end without other ranks."""
    if _has_broken:
        break_connections(lasting=True)


def spare_port(port: int) -> None:
    """Never shut down connections to this port, such as of a store, where other ranks look for the failure."""
    _spared_ports.add(port)


def count_received(but_port: int | None) -> int | None:
    """Return the bytes received over all open TCP connections except to one port; None if unknown."""
    try:
        sockets = _list_sockets() if hasattr(socket, "TCP_INFO") else None  # only Linux has it
    except OSError:  # no descriptor is left to list the folder with
        sockets = None
    if sockets is None:
        return None
    received = 0
    for descriptor, _ in sockets:
        with contextlib.suppress(OSError, struct.error), _duplicate(descriptor) as connection:
            if connection.type == socket.SOCK_STREAM and _is_internet(connection):
                if but_port in (connection.getsockname()[1], connection.getpeername()[1]):
                    continue
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED.size)
                received += int(_BYTES_RECEIVED.unpack(info)[0])
    return received


def _duplicate(descriptor: int) -> socket.socket:
    """Return a socket that can be closed without closing the original.

    `SOCK_NONBLOCK` keeps Python from changing a flag that both sockets share to `socket.getdefaulttimeout()`.
    """
    kind = socket.SOCK_STREAM | getattr(socket, "SOCK_NONBLOCK", 0)
    return socket.socket(type=kind, fileno=os.dup(descriptor))


def _is_internet(connection: socket.socket) -> bool:
    return connection.family in (socket.AF_INET, socket.AF_INET6)


def _shut_down(descriptor: int, inode: int) -> bool:
    with contextlib.suppress(OSError):  # the owner has closed it meanwhile
        if os.fstat(descriptor).st_ino != inode:
            return False
        with _duplicate(descriptor) as connection:  # a shutdown concerns the connection, which both sockets share
            if not _is_internet(connection) or connection.getsockname()[1] in _spared_ports:
                return False
            if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):  # a listening socket stays
                connection.shutdown(socket.SHUT_RDWR)
                return True
    return False


def _list_sockets() -> set[_Connection]:
    folder = next((folder for folder in _FOLDERS if os.path.isdir(folder)), None)
    found = set()
    for name in [] if folder is None else os.listdir(folder):
        with contextlib.suppress(OSError):  # such as the descriptor of the folder itself
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found.add((int(name), status.st_ino))
    return found
