"""Whether hosts reach each other, found out in seconds.

gloo connects every pair of ranks, and gives up on a pair after five times its time limit: two and a half hours by
default. A plain connection to each host first tells the same in seconds, and which host it is.
"""

import contextlib
import errno
import os
import selectors
import socket
import time
from collections.abc import Iterable, Sequence

from lightning_ddp_ext.network.ports import bind

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
