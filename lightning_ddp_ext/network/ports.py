"""Ports of this host: taking one, and saying who has it."""

import errno
import os
import socket
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
