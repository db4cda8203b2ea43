"""Making the process group of a run."""

import atexit
import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_ddp_ext.distributed.backends import check_backend
from lightning_ddp_ext.distributed.connections import break_rest, tracked_connections
from lightning_ddp_ext.distributed.init_method import RendezvousEndpoint, parse_init_method
from lightning_ddp_ext.distributed.interfaces import AUTO, check_interface, pin_interface, unpin_interface
from lightning_ddp_ext.distributed.network_choice import ChosenNetwork
from lightning_ddp_ext.distributed.port_search import open_store_of_run
from lightning_ddp_ext.distributed.rendezvous import RendezvousInfo, rendezvous, report_problem
from lightning_ddp_ext.distributed.stores import OpenStore, has_listener
from lightning_ddp_ext.errors import NetworkInterfaceError, RendezvousError

_TELLING_LIMIT = 1.0  # seconds for rank 0 to be told that this rank cannot start


def init_process_group(
    *,
    backend: str,
    rank: int,
    world_size: int,
    main_address: str,
    main_port: int,
    other_ports: Sequence[int] = (),
    run: str = "",
    timeout: timedelta,
    init_method: str | None = None,
    network_interface: str | None = None,
    num_nodes: int = 1,
    device_id: torch.device | None = None,
    on_store_open: Callable[[RendezvousInfo, OpenStore], None] | None = None,
) -> ChosenNetwork | None:
    """Make the default process group over a network interface that connects all hosts.

    The same on every rank, once. Ranks meet in a store of our own, which listens on the main address only, on the
    loopback address if there is one host, and, where rank 0 does not know its main address, on the one that leads to
    the other hosts. They agree on an interface per host, check in seconds that hosts reach each other, and tell gloo
    and NCCL.

    Args:
        backend: `"gloo"`, `"nccl"` and so on, or by device type, `"cpu:gloo,cuda:nccl"`.
        rank: This rank.
        world_size: Number of ranks.
        main_address: Name or address of rank 0's host.
        main_port: A free port there.
        other_ports: Ports that rank 0 tries in this order if that one is taken, the same on every rank; the others look
            for its store there. None are tried by default.
        run: A name of the run, the same on every rank and of no other run on these hosts; for `other_ports`.
        timeout: How long ranks wait for each other here, and the time limit of one collective afterwards.
        init_method: Another rendezvous endpoint than the main address, see `parse_init_method`.
        network_interface: Name of an interface that every host has; `"loopback"`, for one host; `"auto"` for the one
            that the other hosts are reached over; None to leave the choice to the backend, within the same limits.
        num_nodes: Number of hosts.
        device_id: The device that this rank is bound to; None or the CPU for none.
        on_store_open: Called with the open store on every rank before ranks agree on a network; an error ends the
            meeting. Not called for MPI.

    Returns:
        What was chosen on each host, for rank 0 to say once. None if there was a process group already, or if MPI
        connects the processes.

    Raises:
        BackendError: If this torch has no such backend.
        NetworkInterfaceError: If a host lacks its interface, or hosts do not reach each other.
        RendezvousError: If ranks do not find each other, or there is a process group of another size.
        ValueError: If `init_method` has no known form.

    Example:
        ```python
        network = init_process_group(
            backend="gloo", rank=0, world_size=2, main_address="node1", main_port=29500,
            timeout=timedelta(minutes=5), network_interface="auto", num_nodes=2,
        )
        print(network)  # gloo over node1: eth0 (10.0.0.1), rank 0; node2: eth0 (10.0.0.2), rank 1
        ```
    """
    if dist.is_initialized():
        _check_existing(rank, world_size)
        return None
    device_id = None if device_id is None or device_id.type == "cpu" else device_id
    check_backend(backend, None if device_id is None else device_id.type)
    if backend.lower() == "mpi":
        dist.init_process_group(backend, timeout=timeout)
        return None
    endpoint = parse_init_method(init_method)
    if endpoint.path is None and endpoint.host is None:
        endpoint = RendezvousEndpoint(main_address, main_port, other_ports=tuple(other_ports), run=run)
    info = RendezvousInfo(
        backend=backend.lower(),
        rank=rank,
        world_size=world_size,
        num_nodes=num_nodes,
        requested=network_interface,
        timeout=timeout,
        remedy=_remedy(endpoint),
        run=endpoint.run,
    )
    unpin_interface()  # what an earlier run chose is not the user's choice
    try:
        check_interface(network_interface, num_nodes)
    except NetworkInterfaceError as error:
        _tell_rank_0(info, endpoint, error)
        raise
    try:
        opened = open_store_of_run(endpoint, rank=rank, world_size=world_size, num_nodes=num_nodes, timeout=timeout)
        if on_store_open is not None:
            on_store_open(info, opened)
        network, store = rendezvous(info, opened)
    except dist.DistError as error:
        raise _lost_meeting(rank, error) from error
    chosen = network.host_of(rank).interface
    if network_interface is not None and chosen is not None:
        pin_interface(chosen, keep=network_interface == AUTO)
    with tracked_connections(lasting=True):
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=device_id
        )
    # NCCL warns about a group that is left behind; a thread of gloo's may abort the interpreter while it ends.
    atexit.register(_destroy)
    return network


def _check_existing(rank: int, world_size: int) -> None:
    existing = (dist.get_rank(), dist.get_world_size())
    if existing != (rank, world_size):
        raise RendezvousError(
            f"this process is rank {existing[0]} of {existing[1]} in a process group that was made before, and rank"
            f" {rank} of {world_size} in this run. Start a new process for every run of another size."
        )


def _lost_meeting(rank: int, error: dist.DistError) -> RendezvousError:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    if rank == 0:  # the store is its own
        return RendezvousError(
            f"rank 0: a rank that had come does not answer any more while ranks are meeting ({reason}). Look for the"
            " errors of the other ranks."
        )
    return RendezvousError(
        f"rank {rank} lost the store of rank 0 while ranks were meeting ({reason}). Look for the error of rank 0."
    )


def _remedy(endpoint: RendezvousEndpoint) -> str:
    if endpoint.path is not None:
        return f"Check that they have been started and that {endpoint.path} is on a file system that all hosts share."
    return f"Check that they have been started, with {endpoint} as the address of rank 0."


def _tell_rank_0(info: RendezvousInfo, endpoint: RendezvousEndpoint, error: NetworkInterfaceError) -> None:
    """Spare rank 0 the wait for this rank, if that takes no time."""
    if info.rank == 0 or endpoint.host is None or endpoint.port is None:
        return
    if not has_listener(endpoint.host, endpoint.port, _TELLING_LIMIT):
        return
    limit = timedelta(seconds=_TELLING_LIMIT)
    with contextlib.suppress(RendezvousError, dist.DistError):  # rank 0 was not there in time; our own error follows
        opened = open_store_of_run(
            endpoint, rank=info.rank, world_size=info.world_size, num_nodes=info.num_nodes, timeout=limit
        )
        report_problem(info, opened, error, limit)


def _destroy() -> None:
    break_rest()
    if dist.is_initialized():
        dist.destroy_process_group()
