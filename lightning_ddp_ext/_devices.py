"""Devices of any kind: CPU, CUDA, XPU, MPS and others. Plain torch: never imports Lightning."""

import contextlib
import functools
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor


def current_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make a device the calling thread's current one; the CPU and MPS have a single device."""
    context: AbstractContextManager[Any] = getattr(torch.get_device_module(device), "device", contextlib.nullcontext)(
        device
    )
    return context


def get_rng_state(device: torch.device) -> Tensor:
    """Return the state of a device's default generator, which is kept on the host."""
    with current_device(device):  # the function of MPS takes no device
        state: Tensor = _random(device).get_rng_state()
    return state


def set_rng_state(state: Tensor, device: torch.device) -> None:
    """Restore the result of `get_rng_state`."""
    with current_device(device):
        _random(device).set_rng_state(state)


def seed_rng(seed: int, device: torch.device) -> None:
    """Seed the generator of one device; `torch.manual_seed` seeds all of them."""
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
        return
    with current_device(device):
        torch.get_device_module(device).manual_seed(seed)


def _random(device: torch.device) -> Any:
    return torch if device.type == "cpu" else torch.get_device_module(device)


def find_accelerator() -> str:
    """Return the type of this machine's accelerator, such as the one of CUDA devices, or `"cpu"` if it has none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if found is None else found.type


@functools.cache
def widest_float(device: torch.device) -> torch.dtype:
    """Return float64, or float32 for a device that does not compute in double precision: MPS and some XPUs."""
    try:
        torch.ones((), dtype=torch.float64, device=device).neg()
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError):
        return torch.float32
    return torch.float64


@functools.cache
def reports_memory(device: torch.device) -> bool:
    """Return True if torch keeps statistics of a device's memory; the CPU and MPS share the memory of the host."""
    try:
        return device.type != "cpu" and bool(torch.accelerator.memory_stats(device))
    except RuntimeError:
        return False


_earlier_peaks: dict[torch.device, int] = {}


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that tensors of this process have taken on a device, before `restart_peak` too."""
    return max(torch.accelerator.max_memory_allocated(device), _earlier_peaks.get(device, 0))


def restart_peak(device: torch.device) -> None:
    """Let the device's statistics of the peak begin with the present."""
    _earlier_peaks[device] = peak_memory(device)
    torch.accelerator.reset_peak_memory_stats(device)
