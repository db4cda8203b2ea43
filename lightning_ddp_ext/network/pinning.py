"""Telling the back-ends which network interface to use, and taking it back."""

import os

# Each back-end reads its own variable, gloo for every process group, NCCL for the first of a process. NCCL takes a
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
    """Give the variables of the back-ends the values they had before; one that was changed since is left alone."""
    for variable, value in _before.items():
        if os.environ.get(variable) != _pinned[variable]:
            continue
        if value is None:
            del os.environ[variable]
        else:
            os.environ[variable] = value
    _before.clear()
    _pinned.clear()
