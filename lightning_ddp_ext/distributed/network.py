"""The network of a run: interfaces, addresses and ports of this node, and the interface that each node uses."""

import ipaddress
import os
import socket
import uuid
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import psutil

from lightning_ddp_ext.distributed.backends import GLOO_INTERFACE, INTERFACE_VARIABLES, includes_gloo
from lightning_ddp_ext.distributed.exchange import list_ranks
from lightning_ddp_ext.errors import NetworkInterfaceError

LOOPBACK = "loopback"
AUTO = "auto"

_DISCARD_PORT = 9  # any port will do, as nothing is sent

_pinned: dict[str, tuple[str | None, str]] = {}  # the value before, and ours, by variable


def pin_interface(name: str, *, keep: bool = False) -> None:
    """Make process groups of this process use an interface until `unpin_interface`; `keep` spares the user's variables.

    The variables stay set because later process groups, for a part of the ranks, read them again.
    """
    unpin_interface()
    for variable, syntax in INTERFACE_VARIABLES.items():
        before = os.environ.get(variable)
        if not (keep and before):
            os.environ[variable] = syntax.format(name)
            _pinned[variable] = before, os.environ[variable]


def unpin_interface() -> None:
    """Restore the variables that `pin_interface` has set, unless they have been changed since."""
    for variable, (before, ours) in _pinned.items():
        if os.environ.get(variable) != ours:
            continue
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before
    _pinned.clear()


def node_name() -> str:
    """Return the host name of this node for messages, with escapes in the place of control characters."""
    return repr(socket.gethostname())[1:-1]


@dataclass(frozen=True, slots=True)
class Interface:
    """An interface, or several with commas, or None for the backend's choice, with the addresses it will listen on."""

    name: str | None
    addresses: tuple[str, ...]

    @property
    def is_loopback(self) -> bool:
        """Whether other nodes cannot reach it."""
        return any(map(is_loopback, self.addresses))


def interface_addresses() -> dict[str, list[str]]:
    """Return the addresses of the interfaces that are up, IPv4 before IPv6, by interface."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    return {
        name: [a.address for family in (socket.AF_INET, socket.AF_INET6) for a in addresses if a.family == family]
        for name, addresses in psutil.net_if_addrs().items()
        if name in up
    }


def check_interface(name: str | None, num_nodes: int = 1) -> None:
    """Raise a NetworkInterfaceError if this node lacks a named interface, or if it is loopback for several nodes."""
    if name not in (None, AUTO):
        find_interface(name, num_nodes)


def find_interface(name: str, num_nodes: int = 1) -> Interface:
    """Return a named interface, or `"loopback"`, with its first address, which gloo takes; see `check_interface`."""
    available = interface_addresses()
    chosen = name
    if name == LOOPBACK:
        chosen = next((found for found, addresses in available.items() if any(map(is_loopback, addresses))), LOOPBACK)
    if not available.get(chosen):
        missing = f"interface `{name}` not found" if name else "no interface named"
        problem = f"interface `{name}` has no address" if chosen in available else missing
        raise NetworkInterfaceError(
            f"{problem} on node {node_name()}; available: {_list_interfaces(available)}."
            " Set `network.interface` to one of these, or to `auto`."
        )
    interface = Interface(chosen, (available[chosen][0],))
    if num_nodes > 1 and interface.is_loopback:
        raise NetworkInterfaceError(
            f"`network.interface={name}` is the loopback interface of node {node_name()}, which other nodes"
            f" cannot reach, and the run has {num_nodes} of them. Set `network.interface` to `auto`."
        )
    return interface


def interface_with(address: str) -> Interface | None:
    """Return the interface that has an address, or None if this node does not have it."""
    for name, addresses in interface_addresses().items():
        if _without_zone(address) in map(_without_zone, addresses):
            return Interface(name, (addresses[0],))
    return None


def address_towards(host: str) -> str:
    """Return the address of this node from which packets to a host leave; raise an OSError if there is no route."""
    family, kind, _, _, target = socket.getaddrinfo(host, _DISCARD_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as unsent:
        unsent.connect(target)
        return str(unsent.getsockname()[0])


def resolve(host: str) -> list[str]:
    """Return the addresses of a host name without duplicates; none for an unknown name."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        return []
    return list(dict.fromkeys(str(target[0]) for *_, target in found))


def is_local(address: str) -> bool:
    """Return True if a server could listen on the address on this node."""
    return is_loopback(address) or interface_with(address) is not None


def is_loopback(address: str) -> bool:
    """Return True if packets to the address never leave their node: 127.0.0.0/8 and ::1."""
    return ipaddress.ip_address(_without_zone(address)).is_loopback


def loopback_address() -> str:
    """Return 127.0.0.1, or ::1 on a node without IPv4."""
    listed = [a for addresses in interface_addresses().values() for a in addresses if is_loopback(a)]
    return listed[0] if listed else "127.0.0.1"


def default_gloo_interface() -> Interface:
    """Return the interface that gloo takes by itself: the one in its variable, or the address of this node's name."""
    names = os.environ.get(GLOO_INTERFACE)
    if not names:
        own = next((address for address in resolve(socket.gethostname()) if is_local(address)), None)
        return Interface(None, (own or loopback_address(),))
    available = interface_addresses()
    for name in names.split(","):
        if not available.get(name):
            raise NetworkInterfaceError(
                f"interface `{name}` in the environment variable `{GLOO_INTERFACE}` not found on node"
                f" {node_name()}; available: {_list_interfaces(available)}."
                " Unset the variable, or name one of these."
            )
    return Interface(names, tuple(available[name][0] for name in names.split(",")))


def check_gloo_variable(backend: str, requested: str | None) -> None:
    """Raise a NetworkInterfaceError if gloo would read its variable and find an interface that this node lacks."""
    if os.environ.get(GLOO_INTERFACE) and requested in (None, AUTO) and includes_gloo(backend):
        default_gloo_interface()


def _list_interfaces(available: dict[str, list[str]]) -> str:
    return ", ".join(f"{name} ({', '.join(found)})" if found else name for name, found in available.items())


def external_addresses() -> list[str]:
    """Return the addresses of this node that another one might reach, IPv4 before IPv6."""
    listed: Iterable[str] = (address for addresses in interface_addresses().values() for address in addresses)
    useful = [address for address in listed if not is_loopback(address) and "%" not in address]
    return sorted(useful, key=lambda address: ":" in address)


def _without_zone(address: str) -> str:
    return address.partition("%")[0]


CONNECT_LIMIT = 10.0  # seconds; TCP itself repeats a lost request after 1, 3 and 7

_BACKLOG = 1024


def listen(address: str | None, port: int) -> socket.socket:
    """Listen on one address, or on all for None; port 0 is any free one. The system accepts connections by itself."""
    if address is None:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        return socket.create_server(("", port), family=family, backlog=_BACKLOG, dualstack_ipv6=both)
    # Address and port alone would lose the zone of a link-local address.
    family, _, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(target, family=family, backlog=_BACKLOG)


def explain_failures(targets: Iterable[tuple[str, int]], limit: float = CONNECT_LIMIT) -> dict[tuple[str, int], str]:
    """Connect to several addresses and ports at once, and return the reason for each that is not reached in time."""

    def attempt(target: tuple[str, int]) -> str | None:
        try:
            socket.create_connection(target, limit).close()
        except TimeoutError:
            return f"no answer within {limit:g} s"
        except OSError as error:
            return error.strerror or str(error)
        return None

    listed = list(dict.fromkeys(targets))
    with ThreadPoolExecutor(max(1, len(listed)), "connect") as threads:  # one for each, so that none waits for another
        return {target: reason for target, reason in zip(listed, threads.map(attempt, listed), strict=True) if reason}


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeNetwork:
    """The interface of one node, which the first of its ranks chooses for all of them."""

    node: str
    ranks: Sequence[int]
    interface: str | None  # None if the backend chooses one
    ports: Mapping[str, int]  # by the address at which other nodes reach the node, to be tried
    reached_over: str | None = None  # the interface on the way to rank 0; None on rank 0's node, and for a file
    available: Mapping[str, Sequence[str]] = field(default_factory=dict, compare=False)  # addresses by interface

    def __str__(self) -> str:
        addresses = f" ({', '.join(self.ports)})" if self.ports else ""
        first, last = self.ranks[0], self.ranks[-1]
        ranks = f"ranks {first}-{last}" if last - first == len(self.ranks) - 1 > 0 else list_ranks(self.ranks)
        return f"{ranks} on {self.node} over {self.interface or 'the default interface'}{addresses}"


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
        return f"{self.backend}: " + "; ".join(map(str, self.nodes))

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
    requested: str | None, *, gloo: bool, num_nodes: int, rank: int, local_address: str | None, others: Iterable[str]
) -> Interface:
    """Choose the interface of this node.

    For `"auto"` it is loopback for one node, and otherwise the interface with its address on the way to rank 0, or with
    the route to addresses of other nodes.
    """
    if requested is None:
        return default_gloo_interface() if gloo and num_nodes > 1 else Interface(None, ())
    if requested != AUTO:
        return find_interface(requested, num_nodes)
    if gloo and os.environ.get(GLOO_INTERFACE):
        return default_gloo_interface()
    if num_nodes == 1:
        return find_interface(LOOPBACK)
    own = None if local_address is None or is_loopback(local_address) else interface_with(local_address)
    return own or interface_towards(others, rank)


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
        f"node {node_name()}, rank {rank}, has no route to the other nodes"
        f" ({'; '.join(reasons) or 'none given'}). Set `network.interface` to the interface that connects the nodes."
    )


def check_no_loopback(nodes: Sequence[NodeNetwork]) -> None:
    """Raise a NetworkInterfaceError if one of several nodes has chosen a loopback address."""
    for node in nodes:
        for address in filter(is_loopback, node.ports):
            chosen = f"interface `{node.interface}`" if node.interface else "the address of its host name"
            raise NetworkInterfaceError(
                f"node {node.node}, rank {node.ranks[0]}, would use {chosen}, {address}, which other nodes cannot"
                " reach. Set `network.interface` to `auto`."
            )
