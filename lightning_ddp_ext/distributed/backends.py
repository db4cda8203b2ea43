"""Checks of process-group backends that need no process group."""

import os

import torch.distributed as dist

from lightning_ddp_ext.errors import BackendError

_BUILT = {
    "gloo": dist.is_gloo_available,
    "nccl": dist.is_nccl_available,
    "mpi": dist.is_mpi_available,
    "ucc": dist.is_ucc_available,
    "xccl": dist.is_xccl_available,
}
_NOT_FOR_TRAINING = ("undefined", "fake")
_REMEDIES = {
    "mpi": "Use `gloo`, also for processes that `mpirun` starts.",
    "nccl": "Use `gloo`, or install a build of torch with CUDA.",
    "ucc": "Use `gloo` on CPUs and `nccl` on CUDA devices.",
}
_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


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


def runs_on_streams(backend: str, device_type: str) -> bool:
    """Return True if the backend of a kind of device issues collectives in order on a stream, as NCCL does.

    gloo instead runs them in several threads of the host, in any order, on devices too; the CPU has no streams.
    """
    by_device = _by_device(backend)
    return device_type != "cpu" and by_device.get(device_type, by_device.get("")) != "gloo"


def _by_device(backend: str) -> dict[str, str]:
    """Return the names of backends by kind of device, `""` for every kind."""
    return {device: name for device, _, name in (part.rpartition(":") for part in backend.lower().split(","))}


def check_mpirun(is_launched: bool) -> None:
    """Raise a BackendError if `mpirun` started several processes and Lightning has not recognised that."""
    for variable in _MPI_SIZES:
        value = os.environ.get(variable, "1")
        if not is_launched and value.isdecimal() and int(value) > 1:
            raise BackendError(
                f"`mpirun` started {value} processes (`{variable}={value}`), but without `mpi4py` they do not find each"
                " other, and each would train on its own. Install `mpi4py`."
            )
