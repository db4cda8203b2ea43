"""Ports of a node: binding, listening and connecting."""

import contextlib
import errno
import os
import selectors
import socket
import time
from collections.abc import Iterable, Sequence
from typing import Any

import psutil

from lightning_ddp_ext.errors import RendezvousError


def bind(address: str | None, port: int) -> socket.socket:
    """Take a port of one address, or of all, without listening: nobody can connect yet.

    Args:
        address: An address of this host; None for all of IPv4 and IPv6.
        port: The port; 0 for a free one.

    Returns:
        The bound socket.

    Raises:
        OSError: If the port is taken, or the address is not one of this host.
    """
    target: tuple[Any, ...]
    if address is not None:
        family, _, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    elif socket.has_dualstack_ipv6():
        family, target = socket.AF_INET6, ("::", port)
    else:
        family, target = socket.AF_INET, ("", port)
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if address is None and family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind(target)  # `socket.create_server` would lose the zone of a link-local address
    except OSError:
        bound.close()
        raise
    return bound


def check_port(address: str | None, port: int) -> None:
    """Refuse a port that another program listens on; for rank 0, a while before it makes its store.

    Args:
        address: The address that the store will listen on; None for all.
        port: The port; 0 for a free one.

    Raises:
        RendezvousError: If the port cannot be had.
    """
    # Only bound: a rank that is looking for rank 0 already must not take this for its store.
    try:
        bind(address, port).close()
    except OSError as error:
        raise port_error(address, port, error) from error


def port_error(address: str | None, port: int, error: OSError) -> RendezvousError:
    """Explain why rank 0 cannot have a port.

    Args:
        address: The address; None for all.
        port: The port.
        error: What the system said.

    Returns:
        The error to raise.
    """
    place = f"port {port} of host {socket.gethostname()} cannot be listened on, {address or 'any address'}, rank 0"
    if error.errno != errno.EADDRINUSE:
        return RendezvousError(f"{place}: {error.strerror}. Choose another port for rank 0.")
    listening = who_listens(port)
    known = f" by {listening}" if listening else ""
    return RendezvousError(
        f"{place}: {os.strerror(errno.EADDRINUSE)}{known}."
        " Choose another port for rank 0, or end the process that has this one."
    )


def who_listens(port: int) -> str | None:
    """Find the process that listens on a port of this host.

    Args:
        port: The port.

    Returns:
        Its name and number, as far as this user may know them; None if none was found.
    """
    try:
        listening = [
            connection
            for connection in psutil.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
        ]
    except psutil.AccessDenied:  # macOS tells nobody but root
        return None
    for number in (connection.pid for connection in listening if connection.pid is not None):
        try:
            return f"`{psutil.Process(number).name()}` (process {number})"
        except psutil.Error:  # ended, or not to be looked at
            return f"process {number}"
    return "a process of another user" if listening else None


CONNECT_LIMIT = 10.0  # seconds; TCP itself repeats a lost request after 1, 3 and 7

_BACKLOG = 1024

Target = tuple[str, int]


class Listener:
    """Sockets that accept connections and never answer: the system completes a connection by itself.

    Args:
        addresses: Addresses of this host to listen on; none for all.

    Raises:
        OSError: If an address is not one of this host.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self._sockets = [listen(address, 0) for address in addresses] or [listen(None, 0)]
        self._addresses = addresses

    @property
    def targets(self) -> list[Target]:
        """Where to connect to."""
        return [(address, s.getsockname()[1]) for address, s in zip(self._addresses, self._sockets, strict=False)]

    @property
    def port(self) -> int:
        """The port of the first socket."""
        return int(self._sockets[0].getsockname()[1])

    def close(self) -> None:
        """Stop listening."""
        for listening in self._sockets:
            listening.close()


def listen(address: str | None, port: int) -> socket.socket:
    """Listen on one address, or on all.

    Args:
        address: An address of this host; None for all of IPv4 and IPv6.
        port: The port; 0 for a free one.

    Returns:
        The listening socket.

    Raises:
        OSError: If the port is taken, or the address is not one of this host.
    """
    listening = bind(address, port)
    try:
        listening.listen(_BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening


def first_connection(targets: Iterable[Target], limit: float = CONNECT_LIMIT) -> str | None:
    """Try to connect to several addresses at once, until one answers.

    Args:
        targets: Addresses and ports.
        limit: Seconds to wait for an answer.

    Returns:
        The address of this host that was used, or None if there was no answer.
    """
    results = _try_all(targets, limit, until_first=True).values()
    return next((local for local, _ in results if local is not None), None)


def explain_failures(targets: Iterable[Target], limit: float = CONNECT_LIMIT) -> dict[Target, str]:
    """Try to connect to several addresses at once, and say why that failed.

    Args:
        targets: Addresses and ports.
        limit: Seconds after which a connection counts as impossible.

    Returns:
        The reason for each that was not reached; empty if all were.
    """
    return {target: reason for target, (local, reason) in _try_all(targets, limit).items() if local is None}


def _try_all(
    targets: Iterable[Target], limit: float, until_first: bool = False
) -> dict[Target, tuple[str | None, str]]:
    results: dict[Target, tuple[str | None, str]] = {}
    deadline = time.monotonic() + limit
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        for target in dict.fromkeys(targets):
            try:
                family, kind, _, _, resolved = socket.getaddrinfo(*target, type=socket.SOCK_STREAM)[0]
                connecting = stack.enter_context(socket.socket(family, kind))
            except OSError as error:
                results[target] = (None, str(error.strerror))
                continue
            connecting.setblocking(False)
            code = connecting.connect_ex(resolved)
            if code in (0, errno.EINPROGRESS):
                selector.register(connecting, selectors.EVENT_WRITE, target)
            else:
                results[target] = (None, os.strerror(code))
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                results[key.data] = _outcome(key.fileobj)
                selector.unregister(key.fileobj)
                if until_first and results[key.data][0] is not None:
                    return results
        for key in selector.get_map().values():
            results[key.data] = (None, f"no answer within {limit:g} s")
    return results


def _outcome(connecting: object) -> tuple[str | None, str]:
    assert isinstance(connecting, socket.socket)  # what was registered
    code = connecting.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    return (None, os.strerror(code)) if code else (str(connecting.getsockname()[0]), "")
