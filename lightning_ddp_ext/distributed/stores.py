"""Stores in which the ranks of a run meet, a TCP store of rank 0, torchrun's store, or a file; and their endpoints."""

import errno
import logging
import math
import os
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from lightning_ddp_ext._validation import check_host
from lightning_ddp_ext.distributed.backends import spare_port
from lightning_ddp_ext.distributed.network import is_local, is_loopback, listen, loopback_address, node_name, resolve
from lightning_ddp_ext.errors import RendezvousError

if sys.platform != "win32":
    import fcntl

_FORMS = "`env://`, `tcp://host:port` or `file:///path`"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.1  # seconds between attempts
REFUSED = "refused"  # key of the reason in a file that was used before
_NOBODY = 65534  # the owner that a file server shows for files of root

# A node that is starting may be unknown or unroutable for a while, but not for as long as a rank waits in a queue.
_UNREACHABLE_LIMIT = 20.0  # seconds
_ATTEMPT_LIMIT = 5.0  # seconds for one connection
_ANSWER_LIMIT = 60.0  # seconds for an answer of a store, which may have thousands of clients or a busy processor
_PATIENCE = 30.0  # seconds after which a rank warns that it waits for rank 0

_LIBUV_LISTENS = torch.__version__ >= "2.8"  # before, only torch's older server takes a socket that listens already

_logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class RendezvousEndpoint:
    """Where ranks meet: a host and a port of rank 0's node, or a file."""

    host: str = ""
    port: int = 0
    path: Path | None = None

    def __str__(self) -> str:
        if self.path is not None:
            return str(self.path)
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_init_method(init_method: str | None) -> RendezvousEndpoint | None:
    """Parse an `init_method`; return None for None and `"env://"`, which leave the endpoint to the cluster."""
    if init_method is None:
        return None
    try:
        parts = urlsplit(init_method)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"`init_method={init_method}`: {error}. Use {_FORMS}.") from error
    if parts.query:
        raise ValueError(f"`init_method={init_method}`: leave out `?{parts.query}`; rank and world size are known.")
    if parts.scheme == "env" and not parts.netloc and not parts.path:
        return None
    if parts.scheme == "tcp":
        if not parts.hostname or not port or parts.path not in ("", "/"):
            raise ValueError(f"`init_method={init_method}` needs a host and a port. Use `tcp://host:port`.")
        check_host("init_method", parts.hostname, "Use `tcp://host:port`.")
        return RendezvousEndpoint(host=parts.hostname, port=port)
    if parts.scheme == "file":
        if parts.netloc or len(parts.path) < 2:
            raise ValueError(f"`init_method={init_method}` needs an absolute path. Use `file:///path`.")
        return RendezvousEndpoint(path=Path(parts.path))
    raise ValueError(f"`init_method={init_method}` is of no known form. Use {_FORMS}.")


@dataclass(frozen=True, slots=True)
class OpenStore:
    """A store, and this node's address on the way to rank 0, None for a file; rank 0's may listen on all addresses."""

    store: dist.Store
    local_address: str | None = None
    everywhere: bool = False


def poll(question: Callable[[], _Answer], deadline: float) -> _Answer:
    """Ask until the answer is truthy or `time.monotonic` reaches the deadline, but once at least; return the answer."""
    pause = _FIRST_PAUSE
    while not (answer := question()) and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    return answer


def open_store(
    endpoint: RendezvousEndpoint, *, rank: int, world_size: int, num_nodes: int, timeout: timedelta
) -> OpenStore:
    """Create the store on rank 0, and connect to it on the others; under torchrun, all connect to its agent's store."""
    if endpoint.path is not None:
        return OpenStore(_open_file(endpoint.path, rank, world_size))
    if rank == 0 and not is_agent_store(endpoint):
        return serve_store(_listening_address(endpoint.host, num_nodes), endpoint.port, world_size, timeout)
    host = loopback_address() if num_nodes == 1 and _is_this_node(endpoint.host) else endpoint.host
    return connect_store(host, endpoint.port, rank=rank, timeout=timeout)


def serve_store(address: str | None, port: int, world_size: int, timeout: timedelta) -> OpenStore:
    """Create a store that listens on one address only, or on all for None; port 0 is any free one."""
    try:
        listening = listen(address, port)
    except OSError as error:
        is_taken = error.errno == errno.EADDRINUSE
        other = ", or end the process that has this one, which `ss -ltnp` lists" if is_taken else ""
        raise RendezvousError(
            f"port {port} of node {node_name()} cannot be listened on, {address or 'any address'}, rank 0:"
            f" {os.strerror(error.errno or 0)}. Choose another port for rank 0{other}."
        ) from error
    return serve_socket(listening, address, world_size, timeout)


def serve_socket(listening: socket.socket, address: str | None, world_size: int, timeout: timedelta) -> OpenStore:
    """Create a store on a socket that listens on an address, or on all for None; its thread answers from now on."""
    port = int(listening.getsockname()[1])
    spare_port(port)
    store = dist.TCPStore(
        address or loopback_address(), port, world_size, is_master=True, timeout=timeout,
        wait_for_workers=False, master_listen_fd=listening.detach(), use_libuv=_LIBUV_LISTENS,
    )  # fmt: skip
    return OpenStore(store, address, everywhere=address is None)


def connect_store(host: str, port: int, *, rank: int, timeout: timedelta) -> OpenStore:
    """Wait for the store of rank 0 and connect to it; an unknown or unreachable host is an error much sooner.

    A plain connection waits for the store, since torch's own client doubles its time limit with every attempt.
    """
    place, own = RendezvousEndpoint(host, port), f"rank {rank} on node {node_name()}"
    limit = timeout.total_seconds()
    started = reachable = time.monotonic()
    has_warned, may_be_old = False, True  # the store may be of an earlier run, which rank 0 is about to leave

    def connect() -> OpenStore | None:
        """Return the store, or None before the time is over."""
        nonlocal reachable, has_warned, may_be_old
        try:
            with socket.create_connection((host, port), timeout=min(_ATTEMPT_LIMIT, limit)) as connection:
                peer, own_address = str(connection.getpeername()[0]), str(connection.getsockname()[0])
        except OSError as failure:
            now, reason = time.monotonic(), failure.strerror or failure
            reachable = now if _is_refusal(failure) else reachable
            if now - started >= limit or now - reachable >= _UNREACHABLE_LIMIT:
                raise RendezvousError(
                    f"{own} could not connect to rank 0 at {place} within {now - started:.0f} s: {reason}."
                    f" {_connection_remedy(host, failure)}"
                ) from failure
            if now - started >= _PATIENCE and not has_warned:
                has_warned = True
                _logger.warning("%s is still waiting for rank 0 at %s: %s", own, place, reason)
            return None
        try:
            store = _open_client(peer, port, min(limit, _ANSWER_LIMIT))
        except (RuntimeError, futures.TimeoutError) as error:
            if may_be_old and isinstance(error, dist.DistNetworkError):
                may_be_old = False
                return None
            reason = str(error).partition("\n")[0] or "no answer in time"
            raise RendezvousError(
                f"{own}: the program that listens at {place} is not the store of rank 0 ({reason}). Choose a port that"
                " nothing else uses."
            ) from error
        store.set_timeout(timeout)
        return OpenStore(store, own_address)

    opened = poll(connect, math.inf)
    assert opened is not None  # `connect` raises an error in the end
    return opened


def _is_refusal(error: OSError) -> bool:
    """Return True if the host answered but has no store yet."""
    return isinstance(error, ConnectionRefusedError | ConnectionResetError)


def _open_client(peer: str, port: int, limit: float) -> dist.Store:
    """Open torch's client in a thread, because it waits forever for a program that accepts but does not answer."""
    opened: futures.Future[dist.Store] = futures.Future()
    timeout = timedelta(seconds=limit)

    def attempt() -> None:
        try:
            opened.set_result(dist.TCPStore(peer, port, is_master=False, timeout=timeout, wait_for_workers=False))
        except RuntimeError as error:
            opened.set_exception(error)

    threading.Thread(target=attempt, name="store-client", daemon=True).start()
    return opened.result(limit)


def _connection_remedy(host: str, error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return f"Set the main address to a name or address of rank 0's node that this node knows, instead of `{host}`."
    if _is_refusal(error):
        several = ", and with several nodes that the main address is not a loopback address"
        return f"Check that rank 0 has been started there{several if any(map(is_loopback, resolve(host))) else ''}."
    return "Set the main address to an address of rank 0's node that this node has a route to."


def is_agent_store(endpoint: RendezvousEndpoint) -> bool:
    """Return True if torchrun's agent has created the store at this endpoint."""
    of_agent = [os.environ.get(name) for name in ("TORCHELASTIC_USE_AGENT_STORE", "MASTER_ADDR", "MASTER_PORT")]
    return of_agent == [str(True), endpoint.host, str(endpoint.port)]


def _listening_address(host: str, num_nodes: int) -> str | None:
    """Return the address of rank 0 that others connect to, or None if this node cannot know it.

    Its own name may stand for 127.0.1.1 or nothing in its own /etc/hosts, and for a translated address elsewhere.
    """
    if host == "localhost" or (num_nodes == 1 and _is_this_node(host)):
        return loopback_address()
    found = [] if num_nodes == 1 else filter(is_local, resolve(host))
    return next((address for address in found if address == host or not is_loopback(address)), None)


def _is_this_node(host: str) -> bool:
    resolved = resolve(host)
    return not resolved or any(map(is_local, resolved))


def _open_file(path: Path, rank: int, world_size: int) -> dist.Store:
    """Open the store of a run in a file that only this user can write and no other run has used."""
    if not path.parent.is_dir():
        raise RendezvousError(
            f"`init_method=file://{path}`: no folder {path.parent} on node {node_name()}, rank {rank}."
            " Create it on a file system that all nodes share."
        )
    _check_access(path, rank)
    _check_content(path, rank)
    store = dist.FileStore(str(path), world_size)
    _check_access(path, rank)  # once more, as somebody else may have created the file in the meantime
    joined = f"joined/{rank}"
    if store.check([joined]):
        problem = (
            f"`init_method=file://{path}` was used before: rank {rank}, {store.get(joined).decode(errors='replace')},"
            " has joined there, and that run still runs or has left its file behind. Delete the file, or use a new name"
            " for every run and every restart."
        )
        store.set(REFUSED, problem)  # for ranks that had not joined before, and would wait for this one
        raise RendezvousError(problem)
    who = f"process {os.getpid()} on node {node_name()} at {time.strftime('%Y-%m-%d %H:%M:%S')}"
    store.set(joined, who)
    return store


def _check_content(path: Path, rank: int) -> None:
    """Raise a RendezvousError unless the file holds entries of torch's or nothing: torch reads anything else forever.

    Keys and values take turns, each behind its length in four bytes.
    """
    problem, number = "it is no file of a rendezvous, or is damaged", 0
    try:
        with open(path, "ab+", opener=lambda name, flags: os.open(name, flags, stat.S_IRUSR | stat.S_IWUSR)) as file:
            if sys.platform != "win32":
                fcntl.flock(file, fcntl.LOCK_SH)  # no entry is being written
            file.seek(0)
            while head := file.read(4):
                length, number = int.from_bytes(head, sys.byteorder), number + 1
                if len(file.read(length)) < length or length < number % 2:  # no key is empty
                    break
            else:
                problem = problem if number % 2 else ""
    except OSError as error:
        problem = error.strerror or str(error)
    if problem:
        raise RendezvousError(
            f"`init_method=file://{path}`, rank {rank} on node {node_name()}: {problem}. Use a new name"
            " in a folder that you can write."
        )


def _check_access(path: Path, rank: int) -> None:
    """Raise a RendezvousError if other users can write or replace the file: its addresses decide who joins the run."""
    if not hasattr(os, "geteuid"):  # a system without Unix users
        return
    problem = None
    # In a folder such as /tmp everybody can write, but only the owner of a file can replace it.
    mode = path.parent.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        problem = f"the folder {path.parent} can be written by all users"
    elif path.exists():
        found = path.stat()
        allowed = {os.geteuid()} if os.geteuid() else {0, _NOBODY}
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            problem = f"the file can be written by other users (its mode is {stat.S_IMODE(found.st_mode):o})"
        elif found.st_uid not in allowed:
            problem = f"the file belongs to user {found.st_uid}"
    if problem is not None:
        raise RendezvousError(
            f"`init_method=file://{path}`, rank {rank} on node {node_name()}: {problem}, who could join or"
            " disturb the run. Use a path in a folder that only you can write."
        )
