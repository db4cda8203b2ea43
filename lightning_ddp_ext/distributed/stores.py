"""Stores in which ranks find each other."""

import logging
import os
import socket
import stat
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from lightning_ddp_ext.distributed.connections import spare_port
from lightning_ddp_ext.distributed.init_method import RendezvousEndpoint, address_text
from lightning_ddp_ext.distributed.interfaces import is_local, is_loopback, loopback_address, resolve
from lightning_ddp_ext.distributed.ports import check_port, listen, port_error
from lightning_ddp_ext.errors import RendezvousError

_NOBODY = 65534  # whom a file server shows as the owner of what root has written


def open_file(path: Path, rank: int, world_size: int) -> dist.Store:
    """Open the store of a run in a file.

    Args:
        path: The file, on a file system that all hosts share.
        rank: This rank.
        world_size: Number of ranks.

    Returns:
        The store.

    Raises:
        RendezvousError: If there is no such folder, if other users can write the file, or if another run has used it.
    """
    if not path.parent.is_dir():
        raise RendezvousError(
            f"`init_method=file://{path}`: no folder {path.parent} on host {socket.gethostname()}, rank {rank}."
            " Create it on a file system that all hosts share."
        )
    _check_access(path, rank)
    store = dist.FileStore(str(path), world_size)
    _check_access(path, rank)  # once more, should somebody have been faster
    joined = f"joined/{rank}"
    if store.check([joined]):
        raise RendezvousError(
            f"`init_method=file://{path}` was used before: rank {rank}, {store.get(joined).decode(errors='replace')},"
            " has joined there, and that run has not ended properly or still runs. Delete the file, or use a fresh name"
            " for every run and every restart."
        )
    who = f"process {os.getpid()} on host {socket.gethostname()} at {time.strftime('%Y-%m-%d %H:%M:%S')}"
    store.set(joined, who)
    return store


def _check_access(path: Path, rank: int) -> None:
    """Refuse a file that others can write, or put another one in the place of.

    What ranks read there, addresses among it, decides whom they talk to.
    """
    if not hasattr(os, "geteuid"):  # no users of this kind
        return
    problem = _problem_of_folder(path.parent) or _problem_of_file(path)
    if problem is not None:
        raise RendezvousError(
            f"`init_method=file://{path}`, rank {rank} on host {socket.gethostname()}: {problem}, who could join or"
            " disturb the run. Use a path in a folder that only you can write."
        )


def _problem_of_folder(folder: Path) -> str | None:
    mode = folder.stat().st_mode
    # In a folder such as /tmp everybody can write, but only the owner of a file can replace it.
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        return f"the folder {folder} can be written by all users"
    return None


def _problem_of_file(path: Path) -> str | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"the file can be written by other users (its mode is {stat.S_IMODE(found.st_mode):o})"
    allowed = {os.geteuid()} if os.geteuid() else {0, _NOBODY}
    return None if found.st_uid in allowed else f"the file belongs to user {found.st_uid}"


# A host that is starting may not be known or routed to yet, but it will not take as long as a rank that queues.
_UNREACHABLE_LIMIT = 20.0  # seconds
_ANSWER_LIMIT = timedelta(seconds=10)  # for a store that accepts connections
_ATTEMPT_LIMIT = 5.0  # seconds for one connection
_PAUSE = 0.1  # seconds between attempts
_PATIENCE = 30.0  # seconds after which a rank says that it waits for rank 0

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OpenStore:
    """A store, and what opening it has told about the network.

    Attributes:
        store: The store.
        local_address: The address of this host on the way to rank 0; None for a file.
        everywhere: Whether it listens on every address of this host.
    """

    store: dist.Store
    local_address: str | None = None
    everywhere: bool = False


def open_store(
    endpoint: RendezvousEndpoint, *, rank: int, world_size: int, num_nodes: int, timeout: timedelta
) -> OpenStore:
    """Open the store where ranks meet.

    Rank 0 makes it and the others connect to it, except under torchrun, whose agent has made one for all.

    Args:
        endpoint: Where; with host and port, or a path.
        rank: This rank.
        world_size: Number of ranks.
        num_nodes: Number of hosts. Ranks of a single host meet on its loopback address, whatever it is called.
        timeout: How long to wait for rank 0.

    Returns:
        The store.

    Raises:
        RendezvousError: If rank 0 cannot be reached, its port is taken, or the file is one of another run or one that
            other users can write.
    """
    if endpoint.path is not None:
        return OpenStore(open_file(endpoint.path, rank, world_size))
    assert endpoint.host is not None  # `env://` has been filled in
    assert endpoint.port is not None
    if rank == 0 and not _is_agents(endpoint):
        return serve_store(_listening_address(endpoint.host, num_nodes), endpoint.port, world_size, timeout)
    return connect_store(connecting_host(endpoint.host, num_nodes), endpoint.port, rank=rank, timeout=timeout)


def serve_store(address: str | None, port: int, world_size: int, timeout: timedelta) -> OpenStore:
    """Make a store that listens on one address only.

    Args:
        address: An address of this host; None for all of them.
        port: The port; 0 for a free one.
        world_size: Number of ranks.
        timeout: How long its own operations wait for a key.

    Returns:
        The store.

    Raises:
        RendezvousError: If the port is taken.
    """
    try:
        listening = listen(address, port)
    except OSError as error:
        raise port_error(address, port, error) from error
    own = address or loopback_address()
    chosen = int(listening.getsockname()[1])
    spare_port(chosen)
    store = dist.TCPStore(
        own,
        chosen,
        world_size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
    return OpenStore(store, address, everywhere=address is None)


def check_endpoint(endpoint: RendezvousEndpoint, num_nodes: int) -> None:
    """Refuse a place whose port another program has; for rank 0, some time before it opens its store.

    Args:
        endpoint: Where ranks will meet; what is not a port of rank 0 is left alone.
        num_nodes: Number of hosts.

    Raises:
        RendezvousError: If the port is taken.
    """
    if endpoint.host is not None and endpoint.port is not None and not _is_agents(endpoint):
        check_port(_listening_address(endpoint.host, num_nodes), endpoint.port)


def connect_store(host: str, port: int, *, rank: int, timeout: timedelta) -> OpenStore:
    """Connect to the store of rank 0.

    torch's own client doubles its patience with every attempt, so that a limit of a minute becomes several; a plain
    connection waits for the store first.

    Args:
        host: Name or address of rank 0's host.
        port: The port there.
        rank: This rank.
        timeout: How long to wait for rank 0, and for keys afterwards.

    Returns:
        The store.

    Raises:
        RendezvousError: If there is none within the limit; much sooner if there is no such host, or no way to it.
    """
    peer, local = _await_listener(host, port, rank, timeout)
    try:
        store = _open_client(peer, port, min(timeout, _ANSWER_LIMIT))
    except (RuntimeError, TimeoutError) as error:
        raise RendezvousError(
            f"rank {rank} on host {socket.gethostname()}: what listens at {address_text(host, port)} is not the store"
            f" of rank 0 ({str(error).partition(chr(10))[0]}). Choose a port that nothing else uses."
        ) from error
    store.set_timeout(timeout)
    return OpenStore(store, local)


def connecting_host(host: str, num_nodes: int) -> str:
    """Return where to connect to in order to reach a host.

    Args:
        host: Its name or address.
        num_nodes: Number of hosts.

    Returns:
        The same; the loopback address if this is the only host.
    """
    return loopback_address() if num_nodes == 1 and _is_this_host(host) else host


def await_host(host: str, port: int, *, rank: int, timeout: timedelta) -> None:
    """Wait until a host answers, even if nothing listens at the port.

    Args:
        host: Name or address of rank 0's host.
        port: The port there.
        rank: This rank.
        timeout: How long to wait.

    Raises:
        RendezvousError: If there is no such host or no way to it, in the limit that `connect_store` has for that.
    """
    _await_listener(host, port, rank, timeout, refusal_will_do=True)


def has_listener(host: str, port: int, limit: float) -> bool:
    """Tell whether something listens right now.

    Args:
        host: Name or address.
        port: The port there.
        limit: Seconds to wait for an answer.

    Returns:
        Whether a connection was accepted.
    """
    try:
        with socket.create_connection((host, port), timeout=limit):
            return True
    except OSError:
        return False


def _await_listener(
    host: str, port: int, rank: int, timeout: timedelta, refusal_will_do: bool = False
) -> tuple[str, str]:
    """Return the addresses of rank 0 and of this host, of a connection that worked; none if it was refused."""
    started = reachable = time.monotonic()
    patience = timeout.total_seconds()
    said = False
    endpoint = address_text(host, port)
    while True:
        try:
            with socket.create_connection((host, port), timeout=min(_ATTEMPT_LIMIT, patience)) as connection:
                return str(connection.getpeername()[0]), str(connection.getsockname()[0])
        except OSError as error:
            waits_for_rank_0 = isinstance(error, ConnectionRefusedError | ConnectionResetError)
            if waits_for_rank_0 and refusal_will_do:
                return "", ""
            now = time.monotonic()
            reachable = now if waits_for_rank_0 else reachable
            waited = now - started
            if waited >= _PATIENCE and not said:
                said = True
                _logger.warning("rank %d is still waiting for rank 0 at %s: %s", rank, endpoint, error.strerror)
            if waited >= patience or now - reachable >= _UNREACHABLE_LIMIT:
                raise RendezvousError(
                    f"rank {rank} on host {socket.gethostname()} could not connect to rank 0 at {endpoint} within"
                    f" {waited:.0f} s: {error.strerror or error}. {_connection_remedy(host, error)}"
                ) from error
        time.sleep(_PAUSE)


def _open_client(peer: str, port: int, limit: timedelta) -> dist.Store:
    """Open torch's client in a thread, as it waits without end for a program that accepts and never answers."""
    opened: list[dist.Store | RuntimeError] = []

    def attempt() -> None:
        try:
            opened.append(dist.TCPStore(peer, port, is_master=False, timeout=limit, wait_for_workers=False))
        except RuntimeError as error:
            opened.append(error)

    thread = threading.Thread(target=attempt, name="store-client", daemon=True)
    thread.start()
    thread.join(limit.total_seconds())
    if not opened:
        raise TimeoutError(f"no answer within {limit.total_seconds():g} s")
    if isinstance(opened[0], RuntimeError):
        raise opened[0]
    return opened[0]


def _connection_remedy(host: str, error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return f"Set the main address to one that this host knows rank 0's host by, instead of `{host}`."
    if isinstance(error, ConnectionRefusedError):
        several = ", and with several hosts that the main address is not a loopback address"
        return f"Check that rank 0 has been started there{several if any(map(is_loopback, resolve(host))) else ''}."
    return "Set the main address to one of rank 0's host that this host has a route to."


def _is_agents(endpoint: RendezvousEndpoint) -> bool:
    """Tell whether torchrun's agent has already made the store at this place."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        return False
    return (endpoint.host, str(endpoint.port)) == (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"))


def _listening_address(host: str, num_nodes: int) -> str | None:
    """Return where rank 0 is looked for, None if that cannot be known here.

    Its own name may stand for 127.0.1.1 or for nothing in its own /etc/hosts, and for a translated address elsewhere.
    """
    resolved = resolve(host)
    if num_nodes == 1:
        return loopback_address() if _is_this_host(host) else None
    if host == "localhost":
        return loopback_address()
    if resolved == [host]:
        return host if is_local(host) else None
    return next((address for address in resolved if is_local(address) and not is_loopback(address)), None)


def _is_this_host(host: str) -> bool:
    resolved = resolve(host)
    return not resolved or any(map(is_local, resolved))
