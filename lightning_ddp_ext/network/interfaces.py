"""The network interfaces of this host."""

import os
import socket

import psutil

from lightning_ddp_ext.errors import NetworkInterfaceError

# Each back-end reads its own variable when a process group is created.
_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def interface_addresses() -> dict[str, list[str]]:
    """List the interfaces of this host that are up.

    Returns:
        IPv4 and IPv6 addresses by interface name.
    """
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [address.address for address in addresses if address.family in families]
        for name, addresses in psutil.net_if_addrs().items()
        if name in up
    }


def pin_interface(name: str | None) -> None:
    """Make back-ends use one network interface in this process and in those it starts.

    Args:
        name: Name of an interface; `"loopback"`; or `"auto"` or None to leave the choice to the back-end.

    Raises:
        NetworkInterfaceError: If this host has no such interface, or none with a loopback address.
    """
    if name in (None, "auto"):
        return
    available = interface_addresses()
    chosen = _find_loopback(available) if name == "loopback" else name
    if chosen not in available:
        listed = ", ".join(f"{other} ({', '.join(addresses)})" for other, addresses in available.items())
        problem = f"interface `{name}` not found" if name else "no interface named"
        raise NetworkInterfaceError(
            f"{problem} on host {socket.gethostname()}; available: {listed}."
            " Set `network.interface` to one of these, or to `auto`."
        )
    for variable in _VARIABLES:
        os.environ[variable] = chosen


def _find_loopback(available: dict[str, list[str]]) -> str:
    for name, addresses in available.items():
        if any(address.startswith("127.") or address == "::1" for address in addresses):
            return name
    return "loopback"
