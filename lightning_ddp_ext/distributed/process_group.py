"""Creating the process group of a run."""

import atexit
from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_ddp_ext.distributed.backends import (
    break_rest,
    check_backend,
    connects_without_store,
    reserve_descriptors,
    runs_on_streams,
    tracked_connections,
)
from lightning_ddp_ext.distributed.exchange import destroy_group
from lightning_ddp_ext.distributed.network import (
    AUTO,
    ChosenNetwork,
    check_gloo_variable,
    check_interface,
    pin_interface,
    unpin_interface,
)
from lightning_ddp_ext.distributed.rendezvous import Rendezvous, RendezvousProgress
from lightning_ddp_ext.distributed.stores import RendezvousEndpoint, is_agent_store, parse_init_method
from lightning_ddp_ext.errors import BackendError, DDPExtError, NetworkInterfaceError, RendezvousError

_REPORT_LIMIT = timedelta(seconds=30)  # for the other ranks to hear that this rank cannot take part


def init_process_group(
    *,
    backend: str,
    rank: int,
    world_size: int,
    main_address: str,
    main_port: int,
    timeout: timedelta,
    init_method: str | None = None,
    network_interface: str | None = None,
    num_nodes: int = 1,
    channels: int = 1,
    device_id: torch.device | None = None,
    progress: RendezvousProgress | None = None,
) -> ChosenNetwork | None:
    """Create the default process group over a network interface that connects all nodes.

    Call it once on every rank, with the same arguments. Ranks meet in a store of rank 0. It listens on the main address
    only, or on the loopback address if there is one node. If rank 0 does not have the main address, the store moves to
    the address that leads to the other nodes. The ranks choose an interface for each node, check within seconds that
    the nodes reach each other, and set the variables of gloo and NCCL.

    Args:
        backend: `"gloo"`, `"nccl"` and so on, or by device type, `"cpu:gloo,cuda:nccl"`.
        rank: This rank.
        world_size: Number of ranks.
        main_address: Name or address of rank 0's node.
        main_port: A free port there.
        timeout: Time limit of the rendezvous, and afterwards of one collective.
        init_method: Another rendezvous endpoint than the main address: `"tcp://host:port"` or `"file:///path"`.
        network_interface: Name of an interface that every node has; `"loopback"`, for one node; `"auto"` for the
            interface that leads to the other nodes; None to leave the choice to the backend.
        num_nodes: Number of nodes.
        channels: Number of process groups of the run; each rank also connects to the store as often. The limit of open
            files is raised to what they need.
        device_id: The device that this rank is bound to, unless gloo serves it; None or the CPU for none.
        progress: Filled in with the state of the rendezvous, to explain a failure.

    Returns:
        The interface of each node. None if there was a process group already, or if MPI connects the processes.

    Raises:
        BackendError: If this torch has no such backend, or this process may not open enough files.
        NetworkInterfaceError: If a node lacks its interface, or nodes do not reach each other.
        RendezvousError: If ranks do not find each other, or there is a process group of another size.
        ValueError: If `init_method` is of no known form.

    Example:
        ```python
        network = init_process_group(
            backend="gloo", rank=0, world_size=2, main_address="node1", main_port=29500,
            timeout=timedelta(minutes=5), network_interface="auto", num_nodes=2,
        )
        print(network)  # gloo: rank 0 on node1 over eth0 (10.0.0.1); rank 1 on node2 over eth0 (10.0.0.2)
        ```
    """
    if dist.is_initialized():
        existing = (dist.get_rank(), dist.get_world_size())
        if existing != (rank, world_size):
            raise RendezvousError(
                f"this process is rank {existing[0]} of {existing[1]} in an earlier process group, and rank {rank} of"
                f" {world_size} in this run. Start a new process for every run of another size."
            )
        return None
    progress = progress or RendezvousProgress()
    progress.backend = backend
    device_type = None if device_id is None else device_id.type
    if connects_without_store(backend):
        check_backend(backend, device_type)
        dist.init_process_group(backend, timeout=timeout)
        return None
    endpoint = parse_init_method(init_method) or RendezvousEndpoint(main_address, main_port)
    unpin_interface()  # the choice of an earlier run is not the user's
    error: DDPExtError | None = None
    try:
        check_backend(backend, device_type)
        check_interface(network_interface, num_nodes)
        check_gloo_variable(backend, network_interface)
        serves = rank == 0 and endpoint.path is None and not is_agent_store(endpoint)  # the store, for all ranks
        reserve_descriptors(rank, world_size, channels * (1 + serves))
    except (BackendError, NetworkInterfaceError) as own_error:
        error = own_error  # raised after the other ranks have heard of it, which would wait for this rank
    progress.endpoint = str(endpoint)
    network, store = Rendezvous(
        backend=backend.lower(),
        rank=rank,
        world_size=world_size,
        num_nodes=num_nodes,
        interface=network_interface,
        timeout=timeout if error is None else min(timeout, _REPORT_LIMIT),
        endpoint=endpoint,
        progress=progress,
        error=error,
    ).meet()
    chosen = network.node_of(rank).interface
    if network_interface is not None and chosen is not None:
        pin_interface(chosen, keep=network_interface == AUTO)
    # In groups of some ranks, torch splits the backend of a bound device for the other ranks, which gloo cannot.
    is_bound = device_id is not None and runs_on_streams(backend, device_id.type)
    with tracked_connections(lasting=True):
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            device_id=device_id if is_bound else None,
        )
    # NCCL warns about a group that is left behind; a thread of gloo's may abort the interpreter while it ends.
    atexit.register(_destroy)
    return network


def _destroy() -> None:
    break_rest()
    if dist.is_initialized():
        destroy_group()
