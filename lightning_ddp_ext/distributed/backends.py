"""Everything that depends on the name of a process-group backend: checks, predicates, environment variables."""

from datetime import timedelta

import torch.distributed as dist

from lightning_ddp_ext.errors import BackendError

DEFAULT_TIMEOUT = timedelta(minutes=30)  # of the start and of one collective; torch's and Lightning's
_BUILT = {
    "gloo": dist.is_gloo_available,
    "nccl": dist.is_nccl_available,
    "mpi": dist.is_mpi_available,
    "ucc": dist.is_ucc_available,
    "xccl": dist.is_xccl_available,
}
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


def available_backends() -> list[str]:
    """Return the names of the backends that this torch was built with or that have been registered since."""
    return [
        name
        for name in dist.Backend.backend_list
        if name not in _NOT_FOR_TRAINING and (name not in _BUILT or _BUILT[name]())
    ]


def check_backend(backend: str | None, device_type: str | None = None) -> None:
    """Raise a BackendError unless this torch has the backend, `"gloo"` or `"cpu:gloo,cuda:nccl"`, for the devices."""
    if backend is None:
        return
    by_device = _by_device(backend)
    available = available_backends()
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
