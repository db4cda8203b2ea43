"""Network interfaces of a node."""

import ipaddress
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from lightning_ddp_ext.errors import NetworkInterfaceError

# Each backend reads its own variable, gloo for every process group, NCCL for the first of a process. NCCL takes a
# name for the beginning of one, `eth1` for `eth10` too, unless an equals sign says that it is the whole name.
_VARIABLES = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}"}

_before: dict[str, str | None] = {}
_pinned: dict[str, str] = {}


def pin_interface(name: str, *, keep: bool = False) -> None:
    """Make process groups of this process use one network interface, replacing an earlier choice of ours.

    Process groups made later, for a part of the ranks, read the variables again; so they stay set until
    `unpin_interface`.

    Args:
        name: Name of an interface.
        keep: Whether variables that somebody else has set are left alone.
    """
    unpin_interface()
    for variable, syntax in _VARIABLES.items():
        value = os.environ.get(variable)
        if keep and value:
            continue
        _before[variable] = value
        _pinned[variable] = os.environ[variable] = syntax.format(name)


def unpin_interface() -> None:
    """Give the variables of the backends the values they had before; one that was changed since is left alone."""
    for variable, value in _before.items():
        if os.environ.get(variable) != _pinned[variable]:
            continue
        if value is None:
            del os.environ[variable]
        else:
            os.environ[variable] = value
    _before.clear()
    _pinned.clear()


LOOPBACK = "loopback"
AUTO = "auto"

_GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"
_DISCARD_PORT = 9  # any port will do where nothing is sent


@dataclass(frozen=True, slots=True)
class Interface:
    """What a host talks over.

    Attributes:
        name: Name of the interface, or several with commas; None where the backend chooses an address by itself.
        addresses: The addresses that the backend will listen on.
    """

    name: str | None
    addresses: tuple[str, ...]

    @property
    def is_loopback(self) -> bool:
        """Whether other hosts cannot reach it."""
        return any(is_loopback(address) for address in self.addresses)


def interface_addresses() -> dict[str, list[str]]:
    """List the interfaces of this host that are up.

    Returns:
        IPv4 addresses, then IPv6 addresses, by interface name.
    """
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    return {
        name: [a.address for family in (socket.AF_INET, socket.AF_INET6) for a in addresses if a.family == family]
        for name, addresses in psutil.net_if_addrs().items()
        if name in up
    }


def check_interface(name: str | None, num_nodes: int = 1) -> None:
    """Refuse an interface that this host does not have; to be called before any process starts.

    Args:
        name: Name of an interface; `"loopback"`; or `"auto"` or None, which cannot be wrong yet.
        num_nodes: Number of hosts of the run.

    Raises:
        NetworkInterfaceError: If this host has no such interface, or if the loopback interface was chosen for several
            hosts.
    """
    if name not in (None, AUTO):
        find_interface(name, num_nodes)


def find_interface(name: str, num_nodes: int = 1) -> Interface:
    """Look up a named interface.

    Args:
        name: Name of an interface, or `"loopback"`.
        num_nodes: Number of hosts of the run.

    Returns:
        The interface with the address that gloo takes, its first.

    Raises:
        NetworkInterfaceError: If this host has no such interface or it has no address, or if it is the loopback
            interface of a run with several hosts.
    """
    available = interface_addresses()
    chosen = _loopback_name(available) if name == LOOPBACK else name
    if not available.get(chosen):
        problem = f"interface `{name}` not found" if name else "no interface named"
        if chosen in available:
            problem = f"interface `{name}` has no address"
        raise NetworkInterfaceError(
            f"{problem} on host {socket.gethostname()}; available: {list_interfaces(available)}."
            " Set `network.interface` to one of these, or to `auto`."
        )
    interface = Interface(chosen, (available[chosen][0],))
    if num_nodes > 1 and interface.is_loopback:
        raise NetworkInterfaceError(
            f"`network.interface={name}` is the loopback interface of host {socket.gethostname()}, which other hosts"
            f" cannot reach, and the run has {num_nodes} of them. Set `network.interface` to `auto`."
        )
    return interface


def interface_with(address: str) -> Interface | None:
    """Find the interface that has an address.

    Args:
        address: An IPv4 or IPv6 address.

    Returns:
        The interface, or None if this host does not have the address.
    """
    for name, addresses in interface_addresses().items():
        if _plain(address) in map(_plain, addresses):
            return Interface(name, (addresses[0],))
    return None


def address_towards(host: str) -> str:
    """Return the address of this host that packets to another one leave from; none is sent.

    Args:
        host: Name or address.

    Returns:
        An address of this host.

    Raises:
        OSError: If there is no route, or no such host.
    """
    family, kind, _, _, target = socket.getaddrinfo(host, _DISCARD_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as unsent:
        unsent.connect(target)
        return str(unsent.getsockname()[0])


def resolve(host: str) -> list[str]:
    """Resolve a name.

    Args:
        host: Name or address.

    Returns:
        Its addresses, without duplicates; empty if the name is not known.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        return []
    return list(dict.fromkeys(str(target[0]) for *_, target in found))


def is_local(address: str) -> bool:
    """Tell whether an address is one of this host.

    Args:
        address: An IPv4 or IPv6 address.

    Returns:
        Whether a server could listen on it here.
    """
    return is_loopback(address) or interface_with(address) is not None


def is_loopback(address: str) -> bool:
    """Tell whether an address never leaves its host.

    Args:
        address: An IPv4 or IPv6 address.

    Returns:
        True for all of 127.0.0.0/8 and for ::1.
    """
    return ipaddress.ip_address(_plain(address)).is_loopback


def loopback_address() -> str:
    """Return the address that processes of this host reach each other by: 127.0.0.1, or ::1 where there is no IPv4."""
    listed = [a for addresses in interface_addresses().values() for a in addresses if is_loopback(a)]
    return listed[0] if listed else "127.0.0.1"


def gloos_choice() -> Interface:
    """Work out which address gloo takes when nobody tells it.

    Returns:
        The interfaces in `GLOO_SOCKET_IFNAME`; otherwise, without a name, the first address that this host's own name
        resolves to and that the host really has; otherwise the loopback address.

    Raises:
        NetworkInterfaceError: If `GLOO_SOCKET_IFNAME` names an interface that this host lacks.
    """
    names = os.environ.get(_GLOO_VARIABLE)
    if names:
        return Interface(names, _addresses_of(names.split(",")))
    own = next((address for address in resolve(socket.gethostname()) if is_local(address)), None)
    return Interface(None, (own or loopback_address(),))


def check_gloos_variable(backend: str, requested: str | None) -> None:
    """Refuse an interface in the environment variable of gloo that this host lacks; asks no other host.

    Args:
        backend: The backend.
        requested: The interface of the run; only `"auto"` and None leave it to the variable.

    Raises:
        NetworkInterfaceError: If there is no such interface.
    """
    names = os.environ.get(_GLOO_VARIABLE)
    if names and requested in (None, AUTO) and "gloo" in backend.lower():
        _addresses_of(names.split(","))


def _addresses_of(names: Sequence[str]) -> tuple[str, ...]:
    available = interface_addresses()
    for name in names:
        if not available.get(name):
            raise NetworkInterfaceError(
                f"interface `{name}` in the environment variable `{_GLOO_VARIABLE}` not found on host"
                f" {socket.gethostname()}; available: {list_interfaces(available)}."
                " Unset the variable, or name one of these."
            )
    return tuple(available[name][0] for name in names)


def list_interfaces(available: dict[str, list[str]]) -> str:
    """Write interfaces and their addresses as one line.

    Args:
        available: What `interface_addresses` returned.

    Returns:
        Such as `"lo (127.0.0.1), eth0 (10.0.0.2)"`.
    """
    return ", ".join(f"{name} ({', '.join(found)})" if found else name for name, found in available.items())


def _loopback_name(available: dict[str, list[str]]) -> str:
    return next((name for name, found in available.items() if any(map(is_loopback, found))), LOOPBACK)


def _plain(address: str) -> str:
    return address.partition("%")[0]
