"""Which interface each host contributes, and what rank 0 says about it."""

import os
import socket
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_ddp_ext.distributed.interfaces import (
    AUTO,
    LOOPBACK,
    Interface,
    address_towards,
    find_interface,
    gloos_choice,
    interface_addresses,
    interface_with,
    is_loopback,
)
from lightning_ddp_ext.distributed.ports import Target, first_connection
from lightning_ddp_ext.errors import NetworkInterfaceError

_SEARCH_LIMIT = 4.0  # seconds for rank 0's addresses; a neighbour that is not there is known to be missing after 3

_NO_INTERFACE = Interface(None, ())


@dataclass(frozen=True, kw_only=True, slots=True)
class HostNetwork:
    """What one host talks over.

    Attributes:
        host: Its name.
        ranks: The ranks on it, the first of which speaks for it.
        interface: Name of the interface; None where the backend chooses by itself.
        targets: Addresses and ports at which other hosts can try to reach it.
    """

    host: str
    ranks: tuple[int, ...]
    interface: str | None
    targets: tuple[Target, ...]

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses at which other hosts reach it."""
        return tuple(address for address, _ in self.targets)

    def __str__(self) -> str:
        addresses = f" ({', '.join(self.addresses)})" if self.targets else ""
        first, last = self.ranks[0], self.ranks[-1]
        adjoining = self.ranks == tuple(range(first, last + 1))
        listed = f"{first}-{last}" if adjoining and last > first else ", ".join(map(str, self.ranks))
        return f"{self.host}: {self.interface or 'no interface chosen'}{addresses}, rank {listed}"


@dataclass(frozen=True, slots=True)
class ChosenNetwork:
    """What every host of a run talks over; as a string, one line for people.

    Attributes:
        backend: The backend.
        hosts: The hosts, that of rank 0 first.
    """

    backend: str
    hosts: tuple[HostNetwork, ...]

    def __str__(self) -> str:
        return f"{self.backend} over " + "; ".join(map(str, self.hosts))

    def host_of(self, rank: int) -> HostNetwork:
        """Return the host that a rank is on.

        Args:
            rank: The rank.

        Returns:
            Its host.
        """
        return next(host for host in self.hosts if rank in host.ranks)


def this_machine() -> str:
    """Return what is equal for processes that share their network, and differs between hosts of the same name."""
    parts = [socket.gethostname()]
    if os.path.exists("/proc/self/ns/net"):  # two containers of one machine have networks of their own
        with open("/proc/sys/kernel/random/boot_id") as file:
            parts += [file.read().strip(), str(os.stat("/proc/self/ns/net").st_ino)]
    else:
        parts.append(str(uuid.getnode()))
    return " ".join(parts)


def choose_interface(
    requested: str | None, *, gloo: bool, num_nodes: int, local_address: str | None
) -> Interface | None:
    """Choose the interface of this host as far as this rank knows.

    Args:
        requested: Name of an interface, `"loopback"`, `"auto"` or None.
        gloo: Whether gloo is among the backends; the user's own choice for it counts as `"auto"`.
        num_nodes: Number of hosts.
        local_address: The address of this host on the way to rank 0.

    Returns:
        The interface; without name and addresses if there is nothing to choose; None if only other hosts can tell.

    Raises:
        NetworkInterfaceError: If this host lacks the interface, or it does not leave the host.
    """
    if requested is None:
        return gloos_choice() if gloo else _NO_INTERFACE
    if requested != AUTO:
        return find_interface(requested, num_nodes)
    if gloo and os.environ.get("GLOO_SOCKET_IFNAME"):
        return gloos_choice()
    if local_address is None or is_loopback(local_address):
        return None
    return interface_with(local_address)


def choose_alone(requested: str | None, *, gloo: bool) -> Interface:
    """Choose the interface of a run on one host.

    Args:
        requested: Name of an interface, `"loopback"`, `"auto"` or None.
        gloo: Whether gloo is among the backends.

    Returns:
        The interface.

    Raises:
        NetworkInterfaceError: If this host lacks the interface.
    """
    if requested is None:
        return _NO_INTERFACE
    chosen = choose_interface(requested, gloo=gloo, num_nodes=1, local_address=None)
    return chosen or find_interface(LOOPBACK)


def search_interface(targets: Sequence[Target]) -> Interface | None:
    """Find an interface over which one of rank 0's addresses answers.

    Args:
        targets: Addresses and ports of rank 0's host.

    Returns:
        The interface, or None if none answers.
    """
    local_address = first_connection(targets, _SEARCH_LIMIT)
    return None if local_address is None else interface_with(local_address)


def interface_towards(addresses: Iterable[str]) -> Interface:
    """Find the interface that other hosts are reached over.

    Args:
        addresses: What other hosts have chosen.

    Returns:
        The interface of the first route.

    Raises:
        NetworkInterfaceError: If there is no route to any of them.
    """
    reasons = []
    for address in addresses:
        try:
            own = address_towards(address)
        except OSError as error:
            reasons.append(f"{address}: {error.strerror}")
            continue
        interface = interface_with(own)
        if interface is not None and not interface.is_loopback:
            return interface
    raise NetworkInterfaceError(
        f"host {socket.gethostname()}, rank 0, has no route to the other hosts ({'; '.join(reasons) or 'none given'})."
        " Set `network.interface` to the interface that connects the hosts."
    )


def all_addresses() -> list[str]:
    """List every address of this host that another one might reach.

    Returns:
        IPv4 addresses, then IPv6 addresses.
    """
    listed = [address for addresses in interface_addresses().values() for address in addresses]
    useful = [address for address in listed if not is_loopback(address) and "%" not in address]
    return sorted(useful, key=lambda address: ":" in address)


def check_leaves_host(hosts: Sequence[HostNetwork]) -> None:
    """Refuse loopback addresses among several hosts.

    Args:
        hosts: What each host has chosen.

    Raises:
        NetworkInterfaceError: If other hosts could not reach one.
    """
    for host in hosts:
        for address in filter(is_loopback, host.addresses):
            chosen = f"interface `{host.interface}`" if host.interface else "the address that its own name resolves to"
            raise NetworkInterfaceError(
                f"host {host.host}, rank {host.ranks[0]}, would talk over {chosen}, {address}, which other hosts cannot"
                " reach. Set `network.interface` to `auto`."
            )


def hosts_from(table: Sequence[Mapping[str, Any]]) -> tuple[HostNetwork, ...]:
    """Read hosts as they came through JSON.

    Args:
        table: One mapping per host.

    Returns:
        The hosts.
    """
    return tuple(
        HostNetwork(
            host=row["host"],
            ranks=tuple(row["ranks"]),
            interface=row["interface"],
            targets=tuple((address, port) for address, port in row["targets"]),
        )
        for row in table
    )
