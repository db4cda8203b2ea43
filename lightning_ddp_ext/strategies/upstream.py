"""Lightning's own strategies, with our process-group and network settings: what the Hydra groups construct."""

from datetime import timedelta
from typing import Any

from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy

from lightning_ddp_ext.network.interfaces import pin_interface


def ddp_strategy(
    process_group_backend: str | None = None,
    timeout_seconds: float = 1800.0,
    network_interface: str | None = None,
    **options: Any,
) -> DDPStrategy:
    """Construct Lightning's `DDPStrategy` on a chosen network interface.

    Args:
        process_group_backend: `"gloo"`, `"nccl"`, or None for what suits the devices.
        timeout_seconds: Time limit of one collective.
        network_interface: See `pin_interface`.
        options: Other arguments of `DDPStrategy`.

    Returns:
        The strategy.

    Raises:
        NetworkInterfaceError: If this host has no such interface.
    """
    pin_interface(network_interface)
    return DDPStrategy(
        process_group_backend=process_group_backend, timeout=timedelta(seconds=timeout_seconds), **options
    )


def fsdp_strategy(
    process_group_backend: str | None = None,
    timeout_seconds: float = 1800.0,
    network_interface: str | None = None,
    **options: Any,
) -> FSDPStrategy:
    """Construct Lightning's `FSDPStrategy` on a chosen network interface.

    Args:
        process_group_backend: `"nccl"`, or None for what suits the devices.
        timeout_seconds: Time limit of one collective.
        network_interface: See `pin_interface`.
        options: Other arguments of `FSDPStrategy`.

    Returns:
        The strategy.

    Raises:
        NetworkInterfaceError: If this host has no such interface.
    """
    pin_interface(network_interface)
    return FSDPStrategy(
        process_group_backend=process_group_backend, timeout=timedelta(seconds=timeout_seconds), **options
    )


def single_device_strategy() -> str:
    """Return what makes the Trainer choose its strategy for one device, wherever that is."""
    return "auto"
