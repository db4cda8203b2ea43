"""Whether a backend can be used at all, known before any process starts."""

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
    """List the backends that this torch was built with, or that were registered since.

    Returns:
        Their names.
    """
    return [
        name
        for name in dist.Backend.backend_list
        if name not in _NOT_FOR_TRAINING and (name not in _BUILT or _BUILT[name]())
    ]


def check_backend(backend: str | None, device_type: str | None = None) -> None:
    """Refuse a backend that is not there, or that cannot communicate for the devices.

    Args:
        backend: A name; names by device type, `"cpu:gloo,cuda:nccl"`; or None for what suits the devices.
        device_type: `"cpu"`, `"cuda"` and so on, where it is known.

    Raises:
        BackendError: If it cannot be used.
    """
    if backend is None:
        return
    by_device = {device: name for device, _, name in (p.rpartition(":") for p in backend.lower().split(","))}
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
            f" {', '.join(devices)}. Leave it out for what suits the devices."
        )


def check_mpirun(started_by_launcher: bool) -> None:
    """Refuse processes of `mpirun` that do not know of each other: each would train by itself.

    Args:
        started_by_launcher: Whether the cluster environment knows that something else starts the processes, as
            `ClusterEnvironment.creates_processes_externally` says.

    Raises:
        BackendError: If `mpirun` started several processes and the cluster environment does not know.
    """
    for variable in _MPI_SIZES:
        value = os.environ.get(variable, "1")
        if not started_by_launcher and value.isdecimal() and int(value) > 1:
            raise BackendError(
                f"`mpirun` started {value} processes (`{variable}={value}`), but without `mpi4py` they do not find each"
                " other, and each would train on its own. Install `mpi4py`."
            )
