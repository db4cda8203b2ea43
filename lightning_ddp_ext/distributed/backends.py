"""Backends of process groups: the devices of each name, and sockets, which are shut down to end a collective.

gloo cannot abort a collective, but gives up without its sockets.
"""

import contextlib
import os
import socket
import stat
import struct
import sys
from collections.abc import Iterator
from datetime import timedelta

import psutil
import torch.distributed as dist

from lightning_ddp_ext.errors import BackendError

if sys.platform != "win32":
    import resource

DEFAULT_TIMEOUT = timedelta(minutes=30)  # of the start and of one collective; torch's and Lightning's
BUILT = {name: getattr(dist, f"is_{name}_available") for name in ("gloo", "nccl", "mpi", "ucc", "xccl")}
_NOT_FOR_TRAINING = ("undefined", "fake")
# gloo reads its variable for every process group, NCCL for the first one of a process. NCCL takes a name as a prefix,
# so that `eth1` also means `eth10`, unless it begins with an equals sign.
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
INTERFACE_VARIABLES = {GLOO_INTERFACE: "{}", "NCCL_SOCKET_IFNAME": "={}"}
_REMEDIES = {
    "mpi": "Use `gloo`, also for processes that `mpirun` starts.",
    "nccl": "Use `gloo`, or install a build of torch with CUDA.",
    "ucc": "Use `gloo` on CPUs and `nccl` on CUDA devices.",
}


def check_backend(backend: str | None, device_type: str | None = None) -> None:
    """Raise a BackendError unless this torch has the backend, `"gloo"` or `"cpu:gloo,cuda:nccl"`, for the devices."""
    if backend is None:
        return
    by_device = _by_device(backend)
    for name in by_device.values():
        dist.is_backend_available(name)  # torch 2.15 lists some, such as `nccl-legacy`, once they have been named
    available = [  # in this build of torch, or registered since
        name
        for name in dist.Backend.backend_list
        if name not in _NOT_FOR_TRAINING and BUILT.get("nccl" if name.startswith("nccl") else name, lambda: True)()
    ]
    for name in by_device.values():
        if name not in available:
            remedy = _REMEDIES.get(name, "Use one of these.")
            raise BackendError(
                f"`process_group_backend={backend}`: this build of torch has no backend `{name}`; available:"
                f" {', '.join(available)}. {remedy}"
            )
    single = by_device.get("")
    devices = dist.Backend.backend_capability.get(single, []) if single else []
    if device_type is not None and devices and device_type not in devices:
        raise BackendError(
            f"`process_group_backend={backend}` does not communicate for {device_type} devices, only for"
            f" {', '.join(devices)}. Leave it out for the default of the devices."
        )


def connects_without_store(backend: str) -> bool:
    """Return True if the backend connects processes by itself, as MPI does, so that there is no store to meet in."""
    return backend.lower() == dist.Backend.MPI


def includes_gloo(backend: str) -> bool:
    """Return True if gloo, which chooses its interface in its own way, serves any kind of device."""
    return dist.Backend.GLOO in _by_device(backend).values()


def uses_sockets_only(backend: str) -> bool:
    """Return True if every message of the backend passes through a socket, so that received bytes show progress."""
    return set(_by_device(backend).values()) == {dist.Backend.GLOO}


def runs_on_streams(backend: str, device_type: str) -> bool:
    """Return True if the backend of a kind of device issues collectives in order on a stream, as NCCL does.

    gloo instead runs them in several threads of the host, in any order, on devices too; the CPU has no streams.
    """
    by_device = _by_device(backend)
    return device_type != "cpu" and by_device.get(device_type, by_device.get("")) != dist.Backend.GLOO


def _by_device(backend: str) -> dict[str, str]:
    """Return the names of backends by kind of device, `""` for every kind."""
    return {device: name for device, _, name in (part.rpartition(":") for part in backend.lower().split(","))}


_LISTENING, _SPARE = 16, 256  # descriptors for listening sockets and event loops; for files and workers


def reserve_descriptors(rank: int, world_size: int, per_rank: int) -> None:
    """Raise the soft limit of open files to the need of a run; raise a `BackendError` if the hard limit is lower."""
    soft, hard = limits_of_descriptors()
    needed = psutil.Process().num_fds() + _LISTENING + per_rank * (world_size - 1) if hard else 0
    if needed > hard:
        raise BackendError(
            f"rank {rank} of {world_size} needs {needed} open files for its connections, and may open {hard}. Raise the"
            f" hard limit where the process is started, `ulimit -n {needed + _SPARE}`."
        )
    if hard and needed + _SPARE > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(needed + _SPARE, hard), hard))


def limits_of_descriptors() -> tuple[int, int]:
    """Return the soft and the hard limit of open files of this process; zeros on Windows, which has none."""
    if sys.platform == "win32":
        return 0, 0
    soft, hard = (sys.maxsize if limit < 0 else limit for limit in resource.getrlimit(resource.RLIMIT_NOFILE))
    return soft, hard


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
    if not hasattr(socket, "TCP_INFO"):  # only Linux has it
        return None
    try:
        sockets = _list_sockets()
    except OSError:  # no descriptor is left to list the folder with
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
