"""The network of a run: which interface each node uses, and how a node chooses its own."""

import os
import socket
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_ddp_ext.distributed.interfaces import (
    AUTO,
    LOOPBACK,
    Interface,
    address_towards,
    default_gloo_interface,
    find_interface,
    has_gloo_variable,
    interface_with,
    is_loopback,
)
from lightning_ddp_ext.distributed.ports import Target
from lightning_ddp_ext.errors import NetworkInterfaceError


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeNetwork:
    """The interface of one node, which the first of its ranks chooses for all of them."""

    node: str
    ranks: tuple[int, ...]
    interface: str | None  # None if the backend chooses one
    targets: tuple[Target, ...]  # at which other nodes can try to reach the node
    reached_over: str | None = None  # the interface on the way to rank 0; None on rank 0's node, and for a file
    available: Mapping[str, Sequence[str]] = field(default_factory=dict, compare=False)  # addresses by interface

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses at which other nodes reach it."""
        return tuple(address for address, _ in self.targets)

    def __str__(self) -> str:
        addresses = f" ({', '.join(self.addresses)})" if self.targets else ""
        first, last = self.ranks[0], self.ranks[-1]
        adjoining = self.ranks == tuple(range(first, last + 1))
        listed = f"{first}-{last}" if adjoining and last > first else ", ".join(map(str, self.ranks))
        return f"{self.node}: {self.interface or 'default interface'}{addresses}, rank {listed}"


@dataclass(frozen=True, slots=True)
class ChosenNetwork:
    """The network of all nodes of a run; as a string, one line for people.

    Attributes:
        backend: The backend.
        nodes: The nodes, starting with rank 0's.
    """

    backend: str
    nodes: tuple[NodeNetwork, ...]

    def __str__(self) -> str:
        return f"{self.backend} over " + "; ".join(map(str, self.nodes))

    def node_of(self, rank: int) -> NodeNetwork:
        """Return the node of a rank."""
        return next(node for node in self.nodes if rank in node.ranks)


def machine_id() -> str:
    """Return a text that is equal for processes with the same network, and differs between nodes of the same name."""
    parts = [socket.gethostname()]
    if os.path.exists("/proc/self/ns/net"):  # two containers on one machine have different networks
        with open("/proc/sys/kernel/random/boot_id") as file:
            parts += [file.read().strip(), str(os.stat("/proc/self/ns/net").st_ino)]
    else:
        parts.append(str(uuid.getnode()))
    return " ".join(parts)


def choose_interface(
    requested: str | None, *, gloo: bool, num_nodes: int, local_address: str | None
) -> Interface | None:
    """Choose the interface of this node, by its address on the way to rank 0 for `"auto"`; None if that is unknown."""
    if requested is None:
        return default_gloo_interface() if gloo else Interface(None, ())
    if requested != AUTO:
        return find_interface(requested, num_nodes)
    if gloo and has_gloo_variable():
        return default_gloo_interface()
    if local_address is None or is_loopback(local_address):
        return None
    return interface_with(local_address)


def choose_for_one_node(requested: str | None, *, gloo: bool) -> Interface:
    """Choose the interface of a run on one node: loopback for `"auto"`."""
    if requested is None:
        return Interface(None, ())
    chosen = choose_interface(requested, gloo=gloo, num_nodes=1, local_address=None)
    return chosen or find_interface(LOOPBACK)


def interface_towards(addresses: Iterable[str], rank: int) -> Interface:
    """Return the interface of the route to the first address of other nodes to which this node has one."""
    reasons = []
    for address in addresses:
        try:
            own = address_towards(address)
        except OSError as error:
            reasons.append(f"{address}: {error.strerror}")
            continue
        interface = interface_with(own)
        # Several nodes may have the same address, such as for a bridge to containers.
        if interface is not None and not interface.is_loopback and own != address:
            return interface
    raise NetworkInterfaceError(
        f"node {socket.gethostname()}, rank {rank}, has no route to the other nodes"
        f" ({'; '.join(reasons) or 'none given'}). Set `network.interface` to the interface that connects the nodes."
    )


def check_no_loopback(nodes: Sequence[NodeNetwork]) -> None:
    """Raise a NetworkInterfaceError if one of several nodes has chosen a loopback address."""
    for node in nodes:
        for address in filter(is_loopback, node.addresses):
            chosen = f"interface `{node.interface}`" if node.interface else "the address of its host name"
            raise NetworkInterfaceError(
                f"node {node.node}, rank {node.ranks[0]}, would use {chosen}, {address}, which other nodes cannot"
                " reach. Set `network.interface` to `auto`."
            )
