"""Ports of a node: listening and connecting."""

import contextlib
import errno
import os
import selectors
import socket
import time
from collections.abc import Iterable
from typing import Any

from lightning_ddp_ext.errors import RendezvousError

CONNECT_LIMIT = 10.0  # seconds; TCP itself repeats a lost request after 1, 3 and 7

_BACKLOG = 1024

Target = tuple[str, int]  # address and port


def listen(address: str | None, port: int) -> socket.socket:
    """Listen on one address, or on all for None; port 0 is any free one. The system accepts connections by itself."""
    target: tuple[Any, ...]
    if address is not None:
        family, _, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    elif socket.has_dualstack_ipv6():
        family, target = socket.AF_INET6, ("::", port)
    else:
        family, target = socket.AF_INET, ("", port)
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if address is None and family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listening.bind(target)  # `socket.create_server` would lose the zone of a link-local address
        listening.listen(_BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening


def port_error(address: str | None, port: int, error: OSError) -> RendezvousError:
    """Return the error that explains why rank 0 cannot listen on a port."""
    place = f"port {port} of node {socket.gethostname()} cannot be listened on, {address or 'any address'}, rank 0"
    is_taken = error.errno == errno.EADDRINUSE
    other = ", or end the process that has this one, which `ss -ltnp` lists" if is_taken else ""
    return RendezvousError(f"{place}: {error.strerror}. Choose another port for rank 0{other}.")


def explain_failures(targets: Iterable[Target], limit: float = CONNECT_LIMIT) -> dict[Target, str]:
    """Connect to several targets at once, and return the reason for each that is not reached within the limit."""
    failed: dict[Target, str] = {}
    deadline = time.monotonic() + limit
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        for target in dict.fromkeys(targets):
            try:
                family, kind, _, _, resolved = socket.getaddrinfo(*target, type=socket.SOCK_STREAM)[0]
                connecting = stack.enter_context(socket.socket(family, kind))
            except OSError as error:
                failed[target] = str(error.strerror)
                continue
            connecting.setblocking(False)
            code = connecting.connect_ex(resolved)
            if code in (0, errno.EINPROGRESS):
                selector.register(connecting, selectors.EVENT_WRITE, target)
            else:
                failed[target] = os.strerror(code)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                connecting = key.fileobj  # type: ignore[assignment]
                selector.unregister(connecting)
                if code := connecting.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    failed[key.data] = os.strerror(code)
        failed |= {key.data: f"no answer within {limit:g} s" for key in selector.get_map().values()}
    return failed
