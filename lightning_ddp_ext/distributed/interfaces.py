"""Network interfaces and addresses of this node."""

import ipaddress
import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass

import psutil

from lightning_ddp_ext.distributed.backends import GLOO_INTERFACE, INTERFACE_VARIABLES, includes_gloo
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
        problem = f"interface `{name}` not found" if name else "no interface named"
        if chosen in available:
            problem = f"interface `{name}` has no address"
        raise NetworkInterfaceError(
            f"{problem} on node {socket.gethostname()}; available: {_list_interfaces(available)}."
            " Set `network.interface` to one of these, or to `auto`."
        )
    interface = Interface(chosen, (available[chosen][0],))
    if num_nodes > 1 and interface.is_loopback:
        raise NetworkInterfaceError(
            f"`network.interface={name}` is the loopback interface of node {socket.gethostname()}, which other nodes"
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
    if names:
        return _interface_of_variable(names)
    own = next((address for address in resolve(socket.gethostname()) if is_local(address)), None)
    return Interface(None, (own or loopback_address(),))


def has_gloo_variable() -> bool:
    """Return True if the user has chosen gloo's interface by its environment variable."""
    return bool(os.environ.get(GLOO_INTERFACE))


def check_gloo_variable(backend: str, requested: str | None) -> None:
    """Raise a NetworkInterfaceError if gloo would read its variable and find an interface that this node lacks."""
    if has_gloo_variable() and requested in (None, AUTO) and includes_gloo(backend):
        default_gloo_interface()


def _interface_of_variable(names: str) -> Interface:
    available = interface_addresses()
    for name in names.split(","):
        if not available.get(name):
            raise NetworkInterfaceError(
                f"interface `{name}` in the environment variable `{GLOO_INTERFACE}` not found on node"
                f" {socket.gethostname()}; available: {_list_interfaces(available)}."
                " Unset the variable, or name one of these."
            )
    return Interface(names, tuple(available[name][0] for name in names.split(",")))


def _list_interfaces(available: dict[str, list[str]]) -> str:
    return ", ".join(f"{name} ({', '.join(found)})" if found else name for name, found in available.items())


def external_addresses() -> list[str]:
    """Return the addresses of this node that another one might reach, IPv4 before IPv6."""
    listed: Iterable[str] = (address for addresses in interface_addresses().values() for address in addresses)
    useful = [address for address in listed if not is_loopback(address) and "%" not in address]
    return sorted(useful, key=lambda address: ":" in address)


def _without_zone(address: str) -> str:
    return address.partition("%")[0]
